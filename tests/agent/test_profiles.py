"""Where a worker is for a second, as a person asks for it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from controller.agent.workers import py_spy
from controller.agent.workers.worker import Worker
from outlast.speedscope import own_shares
from outlast.v1 import agents_pb2
from tests.agent.test_logs import answers
from tests.agent.test_stacks import needs_tool, worker

__all__ = ["worker"]

SECOND = agents_pb2.Recording(seconds=1, rate=50)


@needs_tool
@pytest.mark.parametrize("native", [False, True])
def test_a_profile_has_where_a_worker_waits(worker: Worker, tmp_path: Path, native: bool) -> None:
    (chunk,) = answers(tmp_path, [worker], recording=SECOND, native=native)
    assert (chunk.rank, chunk.attempt) == (3, 2)
    found = agents_pb2.RankProfile.FromString(chunk.data)
    assert not found.problem
    document = json.loads(gzip.decompress(found.speedscope))
    (thread,) = document["profiles"]
    assert sum(thread["weights"]) == pytest.approx(1.0, abs=0.5)
    names = {frame["name"] for frame in document["shared"]["frames"]}
    assert "train_step" in names
    ((innermost, share), *_) = own_shares(document).items()
    assert share > 0.5
    assert native or innermost.name == "train_step"


def test_other_ranks_and_jobs_are_not_recorded(worker: Worker, tmp_path: Path) -> None:
    assert answers(tmp_path, [worker], "other", recording=SECOND) == []
    assert answers(tmp_path, [worker], recording=SECOND, rank=1) == []


def test_without_the_tool_that_is_said(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: None)
    (chunk,) = answers(tmp_path, [worker], recording=SECOND)
    found = agents_pb2.RankProfile.FromString(chunk.data)
    assert "py-spy is not installed on this node" in found.problem
    assert not found.speedscope


@needs_tool
def test_a_worker_that_has_just_ended_has_no_profile(worker: Worker, tmp_path: Path) -> None:
    worker.pid = 2**22 - 1
    (chunk,) = answers(tmp_path, [worker], recording=SECOND)
    found = agents_pb2.RankProfile.FromString(chunk.data)
    assert found.problem.startswith("py-spy record: ")
