"""Where workers stand that go on afterwards, as a person asks for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.agent.observe.logs import Logs
from controller.agent.workers import stacks
from controller.agent.workers.worker import Worker
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles

needs_tool = pytest.mark.skipif(stacks._tool() is None, reason="py-spy is not installed")

DEADLINE_S = 60.0
PROGRAM = """
import sys

def train_step():
    print("ready", flush=True)
    sys.stdin.read()

train_step()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """One that waits in `train_step`."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script)]
    loop = asyncio.new_event_loop()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Worker(
            job_id="job",
            attempt=2,
            rank=3,
            paths=WorkerFiles.below(tmp_path, 3),
            requested_ns=0,
            gone=loop.create_future(),
            pid=process.pid,
        )
        process.kill()
    loop.close()


def asked(worker: Worker, jobs_dir: Path, **query: object) -> list[agents_pb2.LogChunk]:
    found: list[agents_pb2.LogChunk] = []
    ended = asyncio.Event()

    async def send(message: agents_pb2.AgentMessage) -> None:
        if message.log_chunk.end:
            ended.set()
        else:
            found.append(message.log_chunk)

    async def run() -> None:
        logs = Logs(jobs_dir, send, max_queries=1, running=lambda: [worker])
        logs.query(agents_pb2.LogQuery(query_id="q", stacks=True, **query))  # type: ignore[arg-type]  # checked by protobuf
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()

    asyncio.run(run())
    return found


@needs_tool
@pytest.mark.parametrize("native", [False, True])
def test_a_worker_says_where_it_stands_and_goes_on(
    worker: Worker, tmp_path: Path, native: bool
) -> None:
    (chunk,) = asked(worker, tmp_path, job_id="job", native=native)
    assert (chunk.rank, chunk.attempt) == (3, 2)
    found = agents_pb2.RankStacks.FromString(chunk.data)
    assert "train_step (train.py:6)" in found.text
    assert "train_step (train.py:6)" in found.location
    # What a hang has left there is kept.
    assert list(tmp_path.glob("*.stacks.txt")) == []


def test_other_ranks_and_jobs_are_not_looked_at(worker: Worker, tmp_path: Path) -> None:
    assert asked(worker, tmp_path, job_id="other") == []
    assert asked(worker, tmp_path, job_id="job", rank=1) == []
