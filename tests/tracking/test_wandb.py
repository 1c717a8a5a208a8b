"""What W&B's files have of a job whose tracker was killed: each step once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast.tracking import run_files
from outlast.tracking.points import Curve
from outlast.tracking.wandb import NOTE, WandB
from tests.tracking.test_points import report
from tests.tracking.test_trackers import losses_in
from tests.tracking.wandb_writer import JOB

# Not imported: every process of the tests would, to collect them.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="wandb is not installed; pip install outlast[trackers]",
)

OFFLINE: dict[str, Any] = {"project": "tests", "job_id": JOB, "spec": {}, "offline": True}
# A run's file is written in blocks of 32 KiB, which have about 70 steps each.
LAST = 900


def test_each_step_is_written_once_however_often_the_tracker_is_killed(tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    found = []
    # Before anything is logged, and behind a block or several of them.
    for kill_at in (0, *generator.integers(1, 400, 4).tolist()):
        found.append(_run_until(tmp_path, kill_at))
    found.append(_run_until(tmp_path, None))
    # Some had nothing in their file, and others more than one block.
    assert found == sorted(found)
    assert found[-1] > 60
    assert sorted(losses_in(tmp_path)) == [(step, float(step)) for step in range(1, LAST + 1)]
    assert json.loads((tmp_path / NOTE).read_text()) == {JOB: LAST}


def _run_until(folder: Path, kill_at: int | None) -> int:
    """Run a tracker, and kill it when it has logged so many steps; with which step it went on."""
    command = [sys.executable, "-m", "tests.tracking.wandb_writer", str(folder), str(LAST)]
    # Not with the process of W&B's that this one may have started: it would live on.
    env = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=env) as process:
        assert process.stdout is not None
        word, first = process.stdout.readline().split()
        assert word == "from"
        if kill_at is None:
            assert process.stdout.read().split()[-1] == "closed"
            assert process.wait() == 0
            return int(first)
        for _ in range(kill_at):
            process.stdout.readline()
        process.kill()
    return int(first)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was ended, of several blocks."""
    folder = tmp_path_factory.mktemp("runs")
    tracker = WandB(folder, **OFFLINE)
    tracker.write(Curve().take([report(step, float(step)) for step in range(1, 201)]))
    tracker.close()
    return folder


def test_a_run_that_was_ended_has_all_of_it_in_its_file(written: Path) -> None:
    (path,) = run_files.runs_of(written, JOB, offline_only=True)
    data = path.read_bytes()
    assert run_files.held_in(data) == (200, True, len(data))
    before = path.stat().st_ino
    assert run_files.settle(path) == 200
    assert path.stat().st_ino == before
    assert json.loads((written / NOTE).read_text()) == {JOB: 200}


def test_a_file_that_ends_anywhere_has_its_whole_records(written: Path, tmp_path: Path) -> None:
    """And is cut to them, so that W&B sends what was counted."""
    (whole,) = run_files.runs_of(written, JOB, offline_only=True)
    data = whole.read_bytes()
    ends = [7, *(end for _, end in run_files.records(data))]
    path = tmp_path / "run-job-1.wandb"
    generator, before = np.random.default_rng(3), 0
    for cut in sorted({*range(60), *ends, *generator.integers(0, len(data), 300).tolist()}):
        path.write_bytes(data[:cut])
        last = run_files.settle(path)
        end = max((each for each in ends if each <= cut), default=cut)
        assert path.read_bytes() == data[: min(cut, end)]
        assert run_files.held_in(path.read_bytes()).last_step == last
        assert last >= before
        before = last
    # Zeros as a file system leaves them where a machine went down, and a byte that flipped.
    middle = ends[len(ends) // 2]
    for tail in (bytes(5000), bytes([data[middle] ^ 1]) + data[middle + 1 :]):
        path.write_bytes(data[:middle] + tail)
        run_files.settle(path)
        assert path.read_bytes() == data[:middle]
    assert before == 200


def test_what_the_old_process_still_writes_is_in_no_file(written: Path, tmp_path: Path) -> None:
    """It may have a block of steps that the next tracker has found missing, and logs again."""
    (whole,) = run_files.runs_of(written, JOB, offline_only=True)
    data = whole.read_bytes()
    folder = tmp_path / "wandb" / "offline-run-1-job-1"
    folder.mkdir(parents=True)
    path = folder / f"run-{JOB}.wandb"
    with path.open("wb", buffering=0) as late:
        late.write(data[:40_000])
        tracker = WandB(tmp_path, **OFFLINE)
        first = tracker.last_step
        assert 0 < first < 200
        late.write(data[40_000:])
        tracker.write(
            Curve(last_step=first).take([report(step, float(step)) for step in range(1, 211)])
        )
        tracker.close()
    assert sorted(losses_in(tmp_path)) == [(step, float(step)) for step in range(1, 211)]


def test_files_may_be_deleted_once_they_were_sent(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "wandb")
    tracker = WandB(tmp_path, **OFFLINE)
    assert tracker.last_step == 200
    tracker.close()


def test_two_jobs_of_one_folder_know_nothing_of_each_other(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    tracker = WandB(tmp_path, **{**OFFLINE, "job_id": "job-10"})
    assert tracker.last_step == 0
    tracker.close()
    assert json.loads((tmp_path / NOTE).read_text()) == {JOB: 200, "job-10": 0}
