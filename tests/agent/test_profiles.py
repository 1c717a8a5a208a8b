"""Where a worker is for a second, as a person asks for it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path

import pytest

from controller.agent.observe.logs import MAX_RECORDINGS, Logs
from controller.agent.workers import profiles, py_spy
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


def problem_with(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, folder: Path, program: str
) -> str:
    """What is said of a tool that does this."""
    tool = folder / "py-spy"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(py_spy, "find", lambda: str(tool))
    (chunk,) = answers(folder, [worker], recording=SECOND)
    return agents_pb2.RankProfile.FromString(chunk.data).problem


def test_a_tool_that_does_not_end_is_ended(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "START_S", 2.0)
    noted = tmp_path / "pid"
    said = problem_with(monkeypatch, worker, tmp_path, f"echo $$ > {noted}; exec sleep 60")
    assert "more than 1 s" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_what_is_no_profile_is_a_problem(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problem_with(monkeypatch, worker, tmp_path, "true") == "py-spy has written nothing"
    said = problem_with(monkeypatch, worker, tmp_path, "echo no permission >&2; false")
    assert said == "py-spy record: no permission"
    monkeypatch.setattr(profiles, "MAX_BYTES", 10)
    # Behind the last option, which is --output.
    write = 'for to; do :; done; echo "{}" > $to'
    assert "lower --rate" in problem_with(monkeypatch, worker, tmp_path, write)

    def no_file(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", no_file)
    assert "Too many open files" in problem_with(monkeypatch, worker, tmp_path, write)


def test_a_node_records_so_many_ranks_at_a_time_and_keeps_them_to_the_end(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is refused, and readers of logs do not take the place of one."""
    end = asyncio.Event()
    found: dict[str, agents_pb2.RankProfile] = {}

    async def record(*_: object, **__: object) -> agents_pb2.RankProfile:
        await end.wait()
        return agents_pb2.RankProfile(speedscope=b"whole")

    async def send(message: agents_pb2.AgentMessage) -> None:
        chunk = message.log_chunk
        if not chunk.end:
            found[chunk.query_id] = agents_pb2.RankProfile.FromString(chunk.data)

    async def run() -> None:
        logs = Logs(tmp_path, send, max_queries=MAX_RECORDINGS + 2, running=lambda: [worker])
        names = [str(number) for number in range(MAX_RECORDINGS + 1)]
        for name in names:
            logs.query(agents_pb2.LogQuery(query_id=name, job_id="job", recording=SECOND))
            await asyncio.sleep(0)
        async with asyncio.timeout(20.0):
            while names[-1] not in found:
                await asyncio.sleep(0)
        assert "ranks of its node are being recorded" in found[names[-1]].problem
        for number in range(5):
            logs.query(agents_pb2.LogQuery(query_id=f"log-{number}", job_id="job", follow=True))
            await asyncio.sleep(0)
        end.set()
        async with asyncio.timeout(20.0):
            while not found.keys() >= set(names):
                await asyncio.sleep(0)
        logs.cancel_all()

    monkeypatch.setattr(profiles, "record", record)
    asyncio.run(run())
    whole = [name for name, each in found.items() if each.speedscope == b"whole"]
    assert sorted(whole) == [str(number) for number in range(MAX_RECORDINGS)]
