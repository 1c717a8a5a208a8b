"""Who computed wrong: a non-finite gradient, and a step that two replicas compute.

Wrong bits come from a hook on a gradient of one rank; the run without them is the oracle.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diagnostics.core.exits import ExitFacts, classify
from outlast.failures import FailureClass
from outlast.layout import Layout
from tests.trainer.jobs import train
from tests.trainer.jobs_numbers import told_of_a_bad_gradient
from tests.trainer.jobs_replay import bit_sums, train_again, train_to_infinity
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import curve, log_of, spec_of, steps_of
from trainer.core.suspects import accused, best_shift, comparable, makers

DONE, FAILED = 0, 1
NOBODY = -1


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (2, {"parallel": {"dp": 2}}),
        (2, {"parallel": {"dp": 2, "micro_batch": 1, "zero": {"level": 3}}}),
        (
            2,
            {
                "parallel": {
                    "dp": 2,
                    "micro_batch": 1,
                    "zero": {"level": 2, "reduce_after": "micro_batch"},
                }
            },
        ),
        (4, {"parallel": {"dp": 2, "pp": 2, "zero": {"level": 1}}, "precision": "bf16"}),
        (4, {"parallel": {"dp": 2, "tp": 2}}),
        (4, {"parallel": {"dp": 2, "cp": 2, "zero": {"level": 1}}}),
    ],
    ids=["dp2", "zero3", "zero2-each", "dp2pp2-bf16", "dp2tp2", "dp2cp2"],
)
def test_where_all_bits_agree_nothing_remains_of_the_comparison(
    ranks: RankPool, folders: tuple[Path, Path], world_size: int, sections: dict[str, Any]
) -> None:
    """With dropout, whose masks follow from the sample and not from who computes it."""
    whole, pieces = folders
    model = {"layers": 2, "hidden": 16, "heads": 2, "seq_len": 16, "dropout": 0.1}
    spec = spec_of(whole.parent, steps=4, model=model, **sections)
    expected = ranks.run(train, world_size, whole, spec, 1)
    found = ranks.run(train_again, world_size, pieces, spec, 1, 3, (), NOBODY)
    assert found == expected
    assert [each["code"] for each in found] == [DONE] * world_size
    assert curve(steps_of(pieces, 1, 0)) == curve(steps_of(whole, 1, 0))
    assert "step 3: every replica's bits are those of another one" in log_of(pieces, 1)


def error_of(folder: Path, rank: int) -> dict[str, str]:
    report: dict[str, str] = json.loads((folder / f"a1-rank-{rank}.error.json").read_text())
    return report


def classes(folder: Path, world_size: int) -> list[FailureClass]:
    """What the agents make of the ends of all ranks."""
    reports = [error_of(folder, rank) for rank in range(world_size)]
    facts = [
        ExitFacts(code=1, exception_type=each["type"], exception_message=each["message"])
        for each in reports
    ]
    return [classify(each).exit_class for each in facts]


def test_one_wrong_bit_accuses_the_replica_that_was_suspected(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    _, folder = folders
    spec = spec_of(folder.parent, steps=4, parallel={"dp": 2, "tp": 2})
    found = ranks.run(train_again, 4, folder, spec, 1, 3, ("n3",), 3)
    assert [each["code"] for each in found] == [FAILED] * 4
    assert classes(folder, 4) == [FailureClass.CASCADE] * 2 + [FailureClass.CORRUPT] * 2
    assert error_of(folder, 2)["message"].startswith("step 3: this replica, 1 (n2, n3), computed")
    # The step is not done, and the weights are those of the step before.
    assert [record.step for record in steps_of(folder, 1, 0)] == [1, 2]


def test_without_an_earlier_sign_two_replicas_cannot_be_told_apart(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    _, folder = folders
    spec = spec_of(folder.parent, steps=4, parallel={"dp": 2})
    ranks.run(train_again, 2, folder, spec, 1, 3, (), 1)
    assert classes(folder, 2) == [FailureClass.CORRUPT_SOMEWHERE] * 2
    assert "one of the replicas 0 (n0), 1 (n1) computed" in error_of(folder, 0)["message"]


def test_of_four_replicas_the_wrong_one_is_found_without_one(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    _, folder = folders
    spec = spec_of(folder.parent, steps=4, parallel={"dp": 4, "zero": {"level": 2}})
    ranks.run(train_again, 4, folder, spec, 1, 3, (), 2)
    expected = [FailureClass.CASCADE] * 4
    expected[2] = FailureClass.CORRUPT
    assert classes(folder, 4) == expected


def ends(
    ranks: RankPool, folder: Path, layout: dict[str, Any], wrong_rank: int, *, after_the_sum: bool
) -> list[FailureClass]:
    """How ranks end, one of which has an infinite gradient."""
    spec = spec_of(folder.parent, steps=4, parallel={"micro_batch": 1, **layout})
    world_size = math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp"))
    codes = ranks.run(train_to_infinity, world_size, folder, spec, wrong_rank, after_the_sum)
    assert codes == [FAILED] * world_size
    return classes(folder, world_size)


OWN, OTHERS = FailureClass.NON_FINITE_OWN, FailureClass.CASCADE
ANYONES = FailureClass.NON_FINITE_GRADIENT


def test_a_gradient_spoilt_after_the_sum_is_that_rank_s(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    dp2, tp2dp2 = folders
    assert ends(ranks, dp2, {"dp": 2}, 1, after_the_sum=True) == [OTHERS, OWN]
    found = ends(ranks, tp2dp2, {"dp": 2, "tp": 2}, 2, after_the_sum=True)
    assert found == [OTHERS, OTHERS, OWN, OTHERS]


def test_without_replicas_the_stage_nearest_to_the_loss_made_it(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    first, last = folders
    assert ends(ranks, first, {"pp": 2}, 0, after_the_sum=True) == [OWN, OTHERS]
    assert ends(ranks, last, {"pp": 2}, 1, after_the_sum=False) == [OTHERS, OWN]


def test_what_was_there_before_the_sum_or_lies_with_one_owner_is_anyone_s(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    before, sharded = folders
    assert ends(ranks, before, {"dp": 2}, 1, after_the_sum=False) == [ANYONES, ANYONES]
    zero = {"dp": 2, "zero": {"level": 1}}
    assert ends(ranks, sharded, zero, 1, after_the_sum=True) == [ANYONES, ANYONES]


@pytest.mark.parametrize(
    ("bad", "layout", "expected"),
    [
        ((0, 0), Layout(dp=2), ()),
        ((0, 1), Layout(dp=2), (1,)),
        ((1, 1), Layout(dp=2), ()),
        # tp 2, dp 2: ranks 0 and 2 are replicas, and so are 1 and 3.
        ((1, 1, 1, 0), Layout(tp=2, dp=2), (1,)),
        # A sum over the tensor group has spread it: the least that is known to hold it.
        ((0, 0, 1, 1), Layout(tp=2, dp=2), (2, 3)),
        ((1, 1), Layout(pp=2), (1,)),
        ((1, 0), Layout(pp=2), (0,)),
        ((1, 1, 0, 1), Layout(pp=2, tp=2), (3,)),
        ((1,), Layout(), (0,)),
    ],
)
def test_who_made_a_gradient_without_a_norm(
    bad: tuple[int, ...], layout: Layout, expected: tuple[int, ...]
) -> None:
    assert makers([bool(each) for each in bad], layout) == frozenset(expected)


def test_a_copy_of_a_tied_table_does_not_make_the_last_stage_the_maker(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Both ends have added up the gradients of their copies before anybody looks."""
    spec = spec_of(
        tmp_path,
        steps=4,
        model={"layers": 3, "hidden": 16, "heads": 2, "seq_len": 16},
        parallel={"pp": 3},
        data={"max_bytes": 2**16, "global_batch": 4},
    )
    told = ranks.run(told_of_a_bad_gradient, 3, spec, tmp_path, 1)
    assert ["of this rank" in each for each in told] == [False, True, False]


@pytest.mark.parametrize(
    ("bad", "copies", "layout", "expected"),
    [
        # What else is bad decides.
        ((1, 1, 0), (1, 0, 1), Layout(pp=3), (1,)),
        ((0, 0, 0), (1, 0, 1), Layout(pp=3), ()),
        # One shard of the table, at both ends.
        ((0, 0, 0, 0), (1, 0, 1, 0), Layout(tp=2, pp=2), ()),
        # Replica 1 at both ends, after its sum over replicas.
        ((0, 0, 0, 0), (0, 1, 0, 1), Layout(dp=2, pp=2), ()),
        # After the sum of both ends.
        ((0, 0, 0), (0, 0, 1), Layout(pp=3), (2,)),
        ((0, 0, 0, 0), (0, 1, 0, 0), Layout(dp=2, pp=2), (1,)),
    ],
)
def test_of_a_tied_table_alone_one_end_is_known(
    bad: tuple[int, ...], copies: tuple[int, ...], layout: Layout, expected: tuple[int, ...]
) -> None:
    own, both = ([bool(each) for each in found] for found in (bad, copies))
    assert makers(own, layout, copies=both) == frozenset(expected)


def test_later_chunks_spread_it_over_all_stages() -> None:
    layout = Layout(pp=3)
    assert makers([True, True, False], layout, num_chunks=2) == frozenset({1})
    # The last stage's first chunk, or anybody's second one.
    assert makers([True, True, True], layout, num_chunks=2) == frozenset()


@pytest.mark.parametrize(
    ("kinds", "layout", "shift", "expected"),
    [
        ((5, 5), Layout(dp=2), 1, [True, True]),
        ((5, 6), Layout(dp=2), 1, [False, False]),
        ((5, 5, 6), Layout(dp=3), 1, [True, False, False]),
        ((5, 6, 5, 6), Layout(dp=4), 2, [True] * 4),
        # Of the first stage both are of a kind, but the second one's gradients flow into it.
        ((5, 5, 5, 6), Layout(dp=2, pp=2), 1, [False, False]),
        ((5, 5, 6, 6), Layout(dp=2, pp=2), 1, [True, True]),
    ],
)
def test_only_replicas_on_the_same_kinds_of_processors_are_compared(
    kinds: tuple[int, ...], layout: Layout, shift: int, expected: list[bool]
) -> None:
    assert comparable(kinds, layout, shift=shift) == expected


def test_bits_of_another_processor_accuse_nobody(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    """It is the second stage's; the first stage's gradients have other bits because of it."""
    _, folder = folders
    spec = spec_of(folder.parent, steps=4, parallel={"dp": 2, "pp": 2})
    found = ranks.run(train_again, 4, folder, spec, 1, 3, (), 3, True)
    assert [each["code"] for each in found] == [DONE] * 4
    assert "step 3: 0 of 2 replicas were compared" in log_of(folder, 1)


def test_a_sum_changes_with_every_bit_and_with_the_order(ranks: RankPool) -> None:
    (sums,) = ranks.run(bit_sums, 1)
    assert len(set(sums.pop("same"))) == 1
    for found in sums.values():
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("differs", "shift", "suspects", "expected"),
    [
        ((False, False), 1, (0,), ()),
        ((True, True), 1, (), (0, 1)),
        ((True, True), 1, (1,), (1,)),
        # One that is wrong now and then: here in one of its two parts only.
        ((False, True, False), 1, (), (1, 2)),
        ((False, True, False), 1, (2,), (2,)),
        ((True, True, False), 1, (), (1,)),
        # An earlier sign does not outweigh what is there now.
        ((True, True, False), 1, (0,), (1,)),
        # Replicas two apart: 0 with 2, 1 with 3.
        ((True, False, False, False, False), 2, (), (0, 2)),
        ((True, False, True, False, False), 2, (), (2,)),
        # More than one wrong replica can explain.
        ((True, False, True, False), 1, (), (0, 1, 2, 3)),
        ((True, False, True, False), 1, (3,), (3,)),
    ],
)
def test_as_few_are_accused_as_explain_it(
    differs: tuple[bool, ...], shift: int, suspects: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert accused(differs, shift=shift, suspects=frozenset(suspects)) == frozenset(expected)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (("a", "b"), 1),
        (("a", "a"), 1),
        # Two replicas on a node: their neighbours' neighbours are elsewhere.
        (("a", "a", "b", "b"), 2),
        (("a", "a", "b", "b", "c", "c"), 2),
        (("a", "b", "c"), 1),
        (("ab", "cd", "ef"), 1),
    ],
)
def test_replicas_are_computed_on_other_nodes_where_there_are_any(
    nodes: tuple[str, ...], expected: int
) -> None:
    assert best_shift([frozenset(each) for each in nodes]) == expected
