"""Runs that leave batches out: the same bits, however often they were interrupted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.storage import Storage
from outlast.blackbox import StepRecord
from outlast.worker_contract import WorkerExitCode
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import spec_of, steps_of, train_and_upload

DONE, STOPPED = WorkerExitCode.DONE, WorkerExitCode.STOPPED


def bits(records: list[StepRecord]) -> list[tuple[int, str, str, int]]:
    return [(r.step, r.loss.hex(), r.grad_norm.hex(), r.tokens) for r in records]


def digests(results: list[dict[str, Any]]) -> list[str]:
    return [result["state"] for result in results]


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"pp": 2}},
        {"parallel": {"dp": 2, "zero": {"level": 3}}},
        {"parallel": {"dp": 2}, "optimizer": {"name": "lamb", "lr": 0.01}},
    ],
    ids=["pp2", "zero3", "lamb"],
)
def test_a_run_resumed_around_a_left_out_step_is_bitwise_the_uninterrupted_one(
    ranks: RankPool, folders: tuple[Path, Path], sections: dict[str, Any]
) -> None:
    whole, pieces = folders
    spec = spec_of(whole.parent, steps=9, **sections)
    skipped = ((5, 5),)
    expected = ranks.run(train, 2, whole, spec, 1, 0, 0, skipped)
    # As it happens: attempts before the verdict know of nothing to leave out.
    ranks.run(train, 2, pieces, spec, 1, 2)
    ranks.run(train, 2, pieces, spec, 2, 2)
    found = steps_of(pieces, 1, 0) + steps_of(pieces, 2, 0)
    assert [record.step for record in found] == [1, 2, 3, 4]
    for attempt in range(3, 8):
        # Step 5 stops nobody: the signal comes with a save of its own.
        results = ranks.run(train, 2, pieces, spec, attempt, 1, 0, skipped)
        found += steps_of(pieces, attempt, 0)
        if {result["code"] for result in results} == {DONE}:
            break
    assert digests(results) == digests(expected)
    assert bits(found) == bits(steps_of(whole, 1, 0))
    left_out = found[4]
    assert (left_out.step, left_out.tokens, math.isnan(left_out.loss)) == (5, 0, True)


def test_a_left_out_step_changes_the_run_from_there_on_only(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    whole, pieces = folders
    spec = spec_of(whole.parent, steps=8)
    ranks.run(train, 1, whole, spec, 1)
    ranks.run(train, 1, pieces, spec, 1, 0, 0, ((5, 5),))
    usual, other = bits(steps_of(whole, 1, 0)), bits(steps_of(pieces, 1, 0))
    assert other[:4] == usual[:4]
    assert all(one[1] != another[1] for one, another in zip(other[4:], usual[4:], strict=True))
    assert all(math.isfinite(record.loss) for record in steps_of(pieces, 1, 0) if record.tokens)


def test_the_last_step_may_be_left_out_and_its_checkpoint_is_stored(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    whole, _ = folders
    spec = spec_of(whole.parent, steps=6)
    results = ranks.run(train, 1, whole, spec, 1, 0, 0, ((6, 6),))
    assert results[0]["code"] == DONE
    train_and_upload(ranks, whole, spec, attempt=2, stop_after=0)
    assert Storage(str(whole / "store" / "job-1")).committed_steps()[0] == 6


def test_a_rollback_goes_back_past_everything_that_was_saved_since(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    """Steps 7 to 10 are left out: what memory and storage have of step 9 is of no use; 5 is."""
    whole, pieces = folders
    spec = spec_of(whole.parent, steps=14, parallel={"dp": 2})
    skipped = ((7, 10),)
    expected = ranks.run(train, 2, whole, spec, 1, 0, 0, skipped)
    train_and_upload(ranks, pieces, spec, attempt=1, stop_after=5)
    train_and_upload(ranks, pieces, spec, attempt=2, stop_after=4)
    storage = Storage(str(pieces / "store" / "job-1"))
    assert storage.committed_steps() == [9, 5]
    assert [record.step for record in steps_of(pieces, 2, 0)][-1] == 9

    results = ranks.run(train, 2, pieces, spec, 3, 0, 9, skipped)
    assert digests(results) == digests(expected)
    assert bits(steps_of(pieces, 3, 0)) == bits(steps_of(whole, 1, 0))[5:]
    # What was undone is out of the way of retention, and of whoever looks for the newest.
    assert 9 not in storage.committed_steps()


def test_a_rollback_to_before_the_first_checkpoint_begins_anew(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    whole, pieces = folders
    spec = spec_of(whole.parent, steps=8)
    skipped = ((2, 5),)
    expected = ranks.run(train, 1, whole, spec, 1, 0, 0, skipped)
    train_and_upload(ranks, pieces, spec, attempt=1, stop_after=4)
    results = ranks.run(train, 1, pieces, spec, 2, 0, 4, skipped)
    assert steps_of(pieces, 2, 0)[0].step == 1
    assert digests(results) == digests(expected)


def test_a_run_interrupted_after_a_rollback_goes_on_from_the_new_history(
    ranks: RankPool, folders: tuple[Path, Path]
) -> None:
    whole, pieces = folders
    spec = spec_of(whole.parent, steps=12, parallel={"pp": 2})
    skipped = ((4, 8),)
    expected = ranks.run(train, 2, whole, spec, 1, 0, 0, skipped)
    ranks.run(train, 2, pieces, spec, 1, 7)
    stopped = ranks.run(train, 2, pieces, spec, 2, 2, 0, skipped)
    assert {result["code"] for result in stopped} == {STOPPED}
    results = ranks.run(train, 2, pieces, spec, 3, 0, 0, skipped)
    assert steps_of(pieces, 3, 0)[0].step == 3
    assert digests(results) == digests(expected)
