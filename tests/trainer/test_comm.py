"""`Comm`: what every operation gives, the same bits on every member, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.jobs import (
    collectives,
    collectives_uneven,
    lost_peer,
    messages_out_of_order,
)
from tests.trainer.ranks import RankPool


@pytest.mark.parametrize("size", [12, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("world_size", [2, 4])
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
