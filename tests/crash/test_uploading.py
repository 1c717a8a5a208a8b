"""Agents that die while they upload, commit and clean up, in one uploader's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint import catalog
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from outlast.crashpoints import CrashPoint
from tests.checkpoint.helpers import commit_steps, load_alone, make_stager, same_bits
from tests.crash.orders import DEADLINE_S, Orders
from tests.crash.uploading import run_uploader

# Three parts, the last of them small.
NUM_FLOATS = (4 << 20) + 5
FINISHED_POINTS = (
    CrashPoint.UPLOAD_BEGUN,
    CrashPoint.FILE_BEGUN,
    CrashPoint.PART_SENT,
    CrashPoint.PARTS_SENT,
    CrashPoint.PAYLOAD_STORED,
    CrashPoint.RECORD_STORED,
    CrashPoint.UPLOAD_DONE,
    CrashPoint.PARTS_ARRIVED,
    CrashPoint.DESCRIPTION_STORED,
    CrashPoint.MANIFEST_STORED,
    CrashPoint.COMMITTED,
    CrashPoint.RECORDS_DELETED,
    CrashPoint.CLEANING,
    CrashPoint.COMMIT_DELETED,
    CrashPoint.STEP_DELETED,
    CrashPoint.REMAINS_DELETED,
    CrashPoint.CLEANED,
)
POINTS = (*FINISHED_POINTS, CrashPoint.GIVING_UP)
OLD, NEW = (4, 5), 7


class Case:
    """A store with two checkpoints and what a dead attempt left, and a third in host memory."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.root = folder / "store/job-1"
        self.url = f"file://{self.root}"
        self.memory = folder / "memory"
        self.storage = Storage(self.url)
        self._orders = orders
        commit_steps(self.url, folder / "memory-before", OLD)
        remains = self.root / "step-00000006.1"
        remains.mkdir()
        (remains / "__0_0.distcp").write_bytes(b"half")
        for path in (remains, *remains.iterdir()):
            os.utime(path, (1, 1))
        stager = make_stager(self.memory, state(NEW), attempt=2)
        stager.save(NEW, {"step": NEW}, upload=True, common_step=-1)
        stager.close()

    def finish(self, *, savers: int = 1, timeout_s: float = 30.0) -> list[str]:
        """Have the next uploader do all that is left; what troubles it had."""
        troubles: list[str] = []
        run_uploader(
            self.url,
            self.memory,
            savers,
            timeout_s,
            lambda step, stage, detail: troubles.append(detail),
        )
        return troubles

    def begin(self, *, savers: int = 1, timeout_s: float = 30.0) -> subprocess.Popen[bytes]:
        """An uploader, which ends by itself or as it was ordered."""
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.crash.uploading", self.url, str(self.memory)),
                *(str(savers), str(timeout_s)),
            ],
            env={**os.environ, **self._orders.environment},
        )

    def files(self) -> list[str]:
        found = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in found)

    def assert_all_committed_load(self) -> list[int]:
        """Whatever exists is whole, and the newest is what was saved; the steps that exist."""
        steps = self.storage.committed_steps()
        for step in steps:
            assert catalog.verify(self.storage, step, lambda num_bytes: None) == []
        if steps[0] == NEW:
            restored = state(-1)
            assert load_alone(self.storage, NEW, restored) == {"step": NEW}
            assert same_bits(restored, state(NEW))
        return steps


def state(value: float) -> list[NamedTensor]:
    weights = torch.arange(NUM_FLOATS, dtype=torch.float32) + value
    return [NamedTensor("w", weights, (NUM_FLOATS,), (0,))]


def files_of(step: int, attempt: int) -> list[str]:
    folder = f"step-{step:08d}.{attempt}"
    return [f"{folder}/{name}" for name in (".metadata", "__0_0.distcp", "manifest.json")]


@pytest.fixture
def case(tmp_path: Path, orders: Orders) -> Case:
    return Case(tmp_path, orders)


@pytest.mark.parametrize("point", FINISHED_POINTS)
def test_a_dead_uploader_leaves_nothing_half_and_the_next_one_finishes(
    point: CrashPoint, case: Case, orders: Orders
) -> None:
    # The second of three parts; of everything else the first.
    orders.give(point, passes=int(point is CrashPoint.PART_SENT))
    with case.begin() as first:
        assert first.wait(DEADLINE_S) == -signal.SIGKILL
    assert orders.is_obeyed(point)
    steps = case.assert_all_committed_load()
    assert steps[0] in (NEW, OLD[1])
    assert OLD[1] in steps

    assert case.finish() == []
    assert case.assert_all_committed_load()[0] == NEW
    # Nothing is left to tidy but what the store's clock must show to be dead.
    age_everything(case.root)
    assert case.finish() == []
    commits = [f"commits/{step:08d}.json" for step in (OLD[1], NEW)]
    assert case.files() == [*commits, *files_of(OLD[1], 1), *files_of(NEW, 2)]


def test_an_uploader_that_dies_giving_up_leaves_what_the_next_one_takes_away(
    case: Case, orders: Orders
) -> None:
    """The part of rank 1 never comes."""
    orders.give(CrashPoint.GIVING_UP)
    with case.begin(savers=2, timeout_s=8.0) as first:
        assert first.wait(DEADLINE_S) == -signal.SIGKILL
    assert orders.is_obeyed(CrashPoint.GIVING_UP)
    assert case.assert_all_committed_load() == [OLD[1], OLD[0]]
    age_everything(case.root)
    # It finds parts that it has not begun, and waits for the others in vain.
    assert case.finish(savers=2, timeout_s=8.0) == []
    commits = [f"commits/{step:08d}.json" for step in OLD]
    assert case.files() == [*commits, *files_of(OLD[0], 1), *files_of(OLD[1], 1)]


def age_everything(root: Path) -> None:
    for path in root.rglob("*"):
        os.utime(path, (1, 1))
