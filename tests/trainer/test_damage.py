"""Whatever file of a checkpoint is damaged or lost, training goes on from the one before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.blackbox import Reader
from outlast.spec.parse import parse_spec
from outlast.worker_contract import WorkerExitCode
from tests.checkpoint.helpers import DEADLINE_S, uploading
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool

DONE, STOPPED = WorkerExitCode.DONE, WorkerExitCode.STOPPED


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x04
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A job of two ranks, and its folder: checkpoints of steps 2 and 4, and no host memory."""
    tmp_path = tmp_path_factory.mktemp("saved")
    (tmp_path / "text.txt").write_text(" ".join(f"step {n};" for n in range(2000)))
    spec = parse_spec(
        {
            "name": "job",
            "steps": 5,
            "model": {"layers": 2, "hidden": 16, "heads": 2, "seq_len": 16},
            "data": {"source": str(tmp_path / "text.txt"), "global_batch": 4},
            "parallel": {"dp": 2},
            "checkpoint": {"storage_interval_steps": 2},
        }
    ).model_dump(mode="json")
    whole = tmp_path / "whole"
    whole.mkdir()
    for attempt, stop_after in ((1, 2), (2, 2)):
        found = ranks.run(train, 2, whole, spec, attempt, stop_after)
        assert {each["code"] for each in found} == {STOPPED}
        memory = whole / "memory/job-1"
        url = str(whole / "store/job-1")
        with uploading(url, memory, local=(0, 1), savers=(0, 1)) as (uploader, news):
            assert uploader.drain(DEADLINE_S)
        assert (news.committed, news.trouble) == ([2 * attempt], [])
    shutil.rmtree(whole / "memory")
    return spec, whole


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_every_file_of_the_newest_checkpoint_matters(
    ranks: RankPool,
    saved: tuple[dict[str, Any], Path],
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    """Two ranks, two checkpoints: of step 2 and, damaged in one file after the other, of step 4."""
    spec, whole = saved
    store = whole / "store/job-1"
    newest = [store / "commits/00000004.json", *(store / "step-00000004.2").rglob("*")]
    names = [path.relative_to(whole) for path in newest if path.is_file()]
    assert len(names) == 5
    finals = set()
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        damage(folder / name)
        finished = ranks.run(train, 2, folder, spec, 3)
        assert {each["code"] for each in finished} == {DONE}
        finals |= {each["state"] for each in finished}
        for rank in range(2):
            reader = Reader(folder / f"a3-rank-{rank}.blackbox")
            assert reader.new_steps()[0].step == 3
            reader.close()
            # A commit record that is gone is a checkpoint that never was.
            is_unknown = name.parts[-2] == "commits" and damage is Path.unlink
            log = (folder / f"a3-rank-{rank}.log").read_text()
            assert is_unknown or "checkpoint step 4: " in log
    # And each time it came to the same end.
    assert len(finals) == 1
