"""Ranks go on where a person let the job go on, and load nothing that was given up."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.storage import Storage
from outlast.chosen import ChosenStart
from outlast.worker_contract import WorkerExitCode
from tests.checkpoint.helpers import commit_steps
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import (
    curve,
    make_text,
    spec_of,
    steps_of,
    train_and_upload,
    upload_all,
)

STOPPED = WorkerExitCode.STOPPED
PARALLEL = {"parallel": {"dp": 2}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What all tests begin with or compare with; nobody changes it."""

    spec: dict[str, Any]
    folder: Path
    # What the ranks of the uninterrupted run ended with, as `train` gives it.
    expected: list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Attempts that stopped, and stored a checkpoint, after steps 6 and 9 of 12; a whole run."""
    folder = tmp_path_factory.mktemp("runs")
    make_text(folder)
    for name in ("whole", "pieces"):
        (folder / name).mkdir()
    spec = spec_of(folder, steps=12, **PARALLEL)
    train_and_upload(ranks, folder / "pieces", spec, attempt=1, stop_after=6)
    train_and_upload(ranks, folder / "pieces", spec, attempt=2, stop_after=3)
    expected = ranks.run(train, 2, folder / "whole", spec, 1)
    return Runs(spec=spec, folder=folder, expected=expected)


@pytest.fixture
def folder(runs: Runs, tmp_path: Path) -> Path:
    """A copy of what these runs left."""
    return shutil.copytree(runs.folder, tmp_path, dirs_exist_ok=True)


def store(folder: Path) -> Storage:
    return Storage(str(folder / "pieces/store/job-1"))


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("step", [0, 6])
def test_training_from_a_chosen_point_is_bitwise_the_uninterrupted_run(
    ranks: RankPool, runs: Runs, folder: Path, step: int, has_memory: bool
) -> None:
    assert store(folder).committed_steps() == [9, 6]
    if not has_memory:
        shutil.rmtree(folder / "pieces/memory")
    chosen = (ChosenStart(step=step, attempt=2),)
    committed = step or -1
    stopped = ranks.run(train, 2, folder / "pieces", runs.spec, 3, 2, committed, (), chosen)
    assert {result["code"] for result in stopped} == {STOPPED}
    # What is given up is set aside and not deleted.
    over = {(9, 2), (6, 1)} if step == 0 else {(9, 2)}
    assert store(folder).committed_steps() == ([] if step == 0 else [6])
    quarantine = {entry.name for entry in store(folder).entries("quarantine")}
    assert quarantine == {f"{at:08d}.{attempt}.json" for at, attempt in over}
    # A later attempt of the same choice goes on from what came after it.
    finished = ranks.run(train, 2, folder / "pieces", runs.spec, 4, 0, committed, (), chosen)
    assert [r["state"] for r in finished] == [r["state"] for r in runs.expected]
    for rank in range(2):
        whole = curve(steps_of(folder / "whole", 1, rank))
        assert curve(steps_of(folder / "pieces", 3, rank)) == whole[step : step + 2]
        assert curve(steps_of(folder / "pieces", 4, rank)) == whole[step + 2 :]


def test_another_checkpoint_than_the_chosen_one_is_not_loaded(
    ranks: RankPool, runs: Runs, folder: Path
) -> None:
    shutil.rmtree(folder / "pieces/memory")
    (damaged,) = (folder / "pieces/store").glob("**/step-00000009.2/__1_0.distcp")
    damaged.unlink()
    chosen = (ChosenStart(step=9, attempt=2),)
    results = ranks.run(train, 2, folder / "pieces", runs.spec, 3, 0, 9, (), chosen)
    assert {result["code"] for result in results} == {1}
    error = json.loads((folder / "pieces/a3-rank-0.error.json").read_text())
    assert error["type"] == "checkpoint.core.errors.NoCheckpointError"
    assert "__1_0.distcp is missing" in error["message"]
    assert store(folder).committed_steps() == [9, 6], "a person may repair it, or choose again"


def test_a_chosen_checkpoint_of_another_folder_is_begun_with(
    ranks: RankPool, runs: Runs, folder: Path
) -> None:
    shutil.copytree(folder / "pieces/store/job-1", folder / "saved")
    chosen = (ChosenStart(step=0, attempt=2, url=str(folder / "saved"), url_step=6),)
    finished = ranks.run(train, 2, folder / "pieces", runs.spec, 3, 0, -1, (), chosen)
    assert [r["state"] for r in finished] == [r["state"] for r in runs.expected]
    for rank in range(2):
        whole = curve(steps_of(folder / "whole", 1, rank))
        assert curve(steps_of(folder / "pieces", 3, rank)) == whole[6:]
    assert Storage(str(folder / "saved")).committed_steps() == [9, 6], "it is not ours"


def test_a_chosen_checkpoint_of_another_model_is_refused_and_nothing_is_lost(
    ranks: RankPool, runs: Runs, folder: Path
) -> None:
    commit_steps(str(folder / "saved"), folder / "other-memory", [6])
    chosen = (ChosenStart(step=0, attempt=2, url=str(folder / "saved")),)
    results = ranks.run(train, 2, folder / "pieces", runs.spec, 3, 0, -1, (), chosen)
    assert {result["code"] for result in results} == {1}
    error = json.loads((folder / "pieces/a3-rank-0.error.json").read_text())
    # The class by which the job is paused, and not failed.
    assert error["type"] == "checkpoint.core.errors.NoCheckpointError"
    assert "it is of another model" in error["message"]
    assert store(folder).committed_steps() == [9, 6], "a person may choose one of them now"


def test_steps_are_committed_again_by_the_attempt_that_trains_them_anew(
    ranks: RankPool, runs: Runs, folder: Path
) -> None:
    """Uploads that were wanted before the choice are not made any more, those after it are."""
    chosen = (ChosenStart(step=0, attempt=2),)
    ranks.run(train, 2, folder / "pieces", runs.spec, 3, 9, -1, (), chosen)
    upload_all(folder / "pieces", runs.spec)
    (step, *_) = store(folder).committed_steps()
    assert (step, store(folder).read_commit(step)[0].attempt) == (9, 3)
