"""Real ranks that die while they restore and while they train: the next attempt ends alike."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoint import catalog
from checkpoint.core.retention import RetentionPolicy
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import Cleaner
from outlast.crashpoints import CrashPoint
from outlast.worker_contract import WorkerExitCode
from tests.crash.orders import Orders
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import make_text, spec_of, train_and_upload, upload_all

MEMORY_POINTS = (
    CrashPoint.RESTORE_BEGUN,
    CrashPoint.RESTORE_FROM_MEMORY,
    CrashPoint.RESTORED,
    CrashPoint.STEP_AGREED,
)
STORAGE_POINTS = (CrashPoint.RESTORE_FROM_STORAGE, CrashPoint.RESTORE_SET_ASIDE)
POINTS = (*MEMORY_POINTS, *STORAGE_POINTS)
DONE, STOPPED = WorkerExitCode.DONE, WorkerExitCode.STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A job of two ranks that was stopped half-way, and how it ends where nothing goes wrong."""

    folder: Path
    spec: dict[str, Any]
    expected: list[str]


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def ranks(orders: Orders) -> Iterator[RankPool]:
    """A helper process whose ranks obey orders to die."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in orders.environment.items():
            patch.setenv(name, value)
        pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def half(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Half:
    """Checkpoints of steps 2 and 4 are in storage, and step 4 is in host memory."""
    folder = tmp_path_factory.mktemp("half")
    make_text(folder)
    spec = spec_of(folder, steps=8, parallel={"dp": 2}, checkpoint={"storage_interval_steps": 2})
    whole, pieces = folder / "whole", folder / "pieces"
    whole.mkdir()
    pieces.mkdir()
    expected = ranks.run(train, 2, whole, spec, 1)
    for attempt in (1, 2):
        train_and_upload(ranks, pieces, spec, attempt=attempt, stop_after=2)
    assert Storage(str(pieces / "store/job-1")).committed_steps() == [4, 2]
    return Half(folder=pieces, spec=spec, expected=[each["state"] for each in expected])


def die_and_finish(
    point: CrashPoint, ranks: RankPool, orders: Orders, half: Half, folder: Path
) -> None:
    """An attempt in which a rank dies at `point`, then one that must reach the end alike."""
    orders.give(point)
    with pytest.raises(AssertionError, match="failed"):
        ranks.run(train, 2, folder, half.spec, 3)
    assert orders.is_obeyed(point)
    finished = ranks.run(train, 2, folder, half.spec, 4)
    assert [each["code"] for each in finished] == [DONE, DONE]
    assert [each["state"] for each in finished] == half.expected
    upload_all(folder, half.spec)
    storage = Storage(str(folder / "store/job-1"))
    assert storage.committed_steps()[0] == 8
    for step in storage.committed_steps():
        assert catalog.verify(storage, step, lambda num_bytes: None) == []


@pytest.mark.parametrize("point", MEMORY_POINTS)
def test_a_rank_that_dies_on_its_way_from_host_memory(
    point: CrashPoint, ranks: RankPool, orders: Orders, half: Half, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(half.folder, tmp_path / "job"))
    die_and_finish(point, ranks, orders, half, folder)


@pytest.mark.parametrize("point", STORAGE_POINTS)
def test_a_rank_that_dies_on_its_way_from_storage(
    point: CrashPoint, ranks: RankPool, orders: Orders, half: Half, tmp_path: Path
) -> None:
    """Host memory is lost; for the second point the newest checkpoint is damaged, too."""
    folder = Path(shutil.copytree(half.folder, tmp_path / "job"))
    shutil.rmtree(folder / "memory")
    if point is CrashPoint.RESTORE_SET_ASIDE:
        payload = folder / "store/job-1/step-00000004.2/__0_0.distcp"
        payload.write_bytes(payload.read_bytes()[:-1])
    die_and_finish(point, ranks, orders, half, folder)
    store = folder / "store/job-1"
    for path in store.rglob("*"):
        os.utime(path, (1, 1))
    Cleaner(Storage(str(store)), RetentionPolicy(keep=2), grace_s=60.0).sweep()
    # The lease of the reader that died has gone, too.
    assert list((store / "leases").iterdir()) == []
