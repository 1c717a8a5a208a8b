"""`Comm`: what every operation gives, the same bits on every member, and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outlast.blackbox import Group, Op
from tests.trainer.jobs import (
    collectives,
    collectives_uneven,
    lost_peer,
    messages_out_of_order,
)
from tests.trainer.jobs_tensor import (
    group_of_one,
    lost_under_way,
    parts_that_do_not_fit,
    rounded_reduce_scatter,
    rows_for_each,
    several_under_way,
    traffic,
    waits_in_the_black_box,
    widening_reduce_scatter,
)
from tests.trainer.ranks import RankPool


@pytest.mark.parametrize(
    ("world_size", "size"),
    [(2, 12), (4, 12), (8, 16), (2, 40_000), (4, 40_000), (8, 40_000)],
)
def test_operations_give_sums_in_rank_order(ranks: RankPool, world_size: int, size: int) -> None:
    found = ranks.run(collectives, world_size, size)
    own = [result["own"] for result in found]
    total = own[0].copy()
    for part in own[1:]:
        total += part
    for rank, result in enumerate(found):
        first = result["first"]
        np.testing.assert_array_equal(first["all_reduce"], total)
        np.testing.assert_array_equal(first["all_reduce_max"], np.max(own, axis=0))
        np.testing.assert_array_equal(first["all_gather"], np.concatenate(own))
        np.testing.assert_array_equal(first["reduce_scatter"], np.split(total, world_size)[rank])
        np.testing.assert_array_equal(first["broadcast"], own[1])
        for name, value in first.items():
            np.testing.assert_array_equal(result["second"][name], value)


def test_an_all_reduce_need_not_divide_among_members(ranks: RankPool) -> None:
    """40,001 x 3 numbers on two ranks: one is left over after the even part."""
    found = ranks.run(collectives_uneven, 2)
    for result in found:
        np.testing.assert_array_equal(result["sum"], found[0]["own"] + found[1]["own"])


def test_tags_tell_messages_apart(ranks: RankPool) -> None:
    assert ranks.run(messages_out_of_order, 2)[1] == [22.0, 21.0, 20.0]


def test_a_lost_peer_is_named_with_group_and_operation(ranks: RankPool) -> None:
    """The victim's error must differ from a culprit's, and say whom it waited for."""
    message = ranks.run(lost_peer, 2)[0]
    assert message.startswith("PeerLostError: dp all_reduce #2 among ranks [0, 1] failed")


@pytest.mark.parametrize(
    ("dtype", "rows"), [("fp32", 5), ("fp32", 30_000), ("fp64", 7), ("bf16", 7)]
)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_operations_under_way_at_once_do_not_cross(
    ranks: RankPool, world_size: int, dtype: str, rows: int
) -> None:
    """Each gives what its blocking form gives, bit for bit, whatever is waited for first."""
    found = ranks.run(several_under_way, world_size, dtype, rows)
    own = [result["own"] for result in found]
    total = found[0]["blocking"]
    for rank, result in enumerate(found):
        np.testing.assert_array_equal(result["blocking"], total)
        np.testing.assert_array_equal(result["reduce"], total)
        np.testing.assert_array_equal(
            result["gather"], np.concatenate([part[:rows] for part in own])
        )
        np.testing.assert_array_equal(result["scatter"], np.split(total, world_size)[rank])
        np.testing.assert_array_equal(result["scatter_in_place"], result["scatter"])
        np.testing.assert_array_equal(
            result["exchange"], np.stack([np.split(part, world_size)[rank] for part in own])
        )


def test_rows_go_to_members_in_any_numbers(ranks: RankPool) -> None:
    # One sends nothing, one gets nothing, and some have nothing for each other.
    counts = [[2, 0, 3], [0, 0, 0], [1, 0, 4]]
    found = ranks.run(rows_for_each, 3, counts)
    assert found[0] == [(0, 0), (0, 1), (2, 0)]
    assert found[1] == []
    assert found[2] == [
        *((0, place) for place in (2, 3, 4)),
        *((2, place) for place in (1, 2, 3, 4)),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_bf16_travels_and_fp32_is_summed(ranks: RankPool, world_size: int) -> None:
    """Others' parts are rounded once, sums are not, and half the bytes are sent."""
    found = ranks.run(rounded_reduce_scatter, world_size)
    for rank, result in enumerate(found):
        parts = [np.split(other["own"], world_size)[rank] for other in found]
        rounded = [part if member == rank else _as_bf16(part) for member, part in enumerate(parts)]
        total = rounded[0].copy()
        for part in rounded[1:]:
            total += part
        np.testing.assert_array_equal(result["part"], total)
        assert result["bytes_sent"] == 2 * 5 * (world_size - 1)


def _as_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_sent_follow_the_formulas(ranks: RankPool, world_size: int) -> None:
    """Of n members, a gather or scatter of N bytes sends N(n-1)/n, an all-reduce twice that."""
    rows = 120_000
    whole = 4 * rows * world_size
    for result in ranks.run(traffic, world_size, rows):
        for name in ("all_gather", "reduce_scatter"):
            assert result[name] == whole * (world_size - 1) // world_size
        assert result["all_reduce"] == 2 * whole * (world_size - 1) // world_size
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            assert result[f"start_{name}"] == result[name]
        assert 0 < result["waited_ns"] <= result["in_flight_ns"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_done_in_the_type_of_the_result(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(widening_reduce_scatter, world_size)
    total = found[0]["own"].copy()
    for result in found[1:]:
        total += result["own"]
    for rank, result in enumerate(found):
        np.testing.assert_array_equal(result["part"], np.split(total, world_size)[rank])


def test_the_black_box_tells_what_is_waited_for(ranks: RankPool) -> None:
    """An operation under way is noted when it is waited for: after the one that overtook it."""
    for entered in ranks.run(waits_in_the_black_box, 2):
        assert entered == [(Op.ALL_REDUCE, Group.TP, -1), (Op.ALL_GATHER, Group.TP, -1)]


def test_a_peer_lost_while_messages_are_under_way_is_named(ranks: RankPool) -> None:
    message = ranks.run(lost_under_way, 2)[0]
    assert message.startswith("PeerLostError: dp ")
    assert "among ranks [0, 1] failed" in message


def test_parts_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    message = ranks.run(parts_that_do_not_fit, 2)[0]
    assert message.startswith("a group of 2 needs a contiguous tensor of 2 times (3,), got (7,)")


def test_a_group_of_one_has_its_result_at_once(ranks: RankPool) -> None:
    for result in ranks.run(group_of_one, 1)[0]:
        assert result.tolist() == [0.0, 1.0, 2.0, 3.0]
