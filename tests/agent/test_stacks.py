"""Where workers stand that go on afterwards, as a person asks for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.agent.workers import py_spy
from controller.agent.workers.worker import Worker
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles
from tests.agent.test_logs import answers

needs_tool = pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")

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


@needs_tool
@pytest.mark.parametrize("native", [False, True])
def test_a_worker_says_where_it_stands_and_goes_on(
    worker: Worker, tmp_path: Path, native: bool
) -> None:
    (chunk,) = answers(tmp_path, [worker], stacks=True, native=native)
    assert (chunk.rank, chunk.attempt) == (3, 2)
    found = agents_pb2.RankStacks.FromString(chunk.data)
    assert "train_step (train.py:6)" in found.text
    assert "train_step (train.py:6)" in found.location
    # What a hang has left there is kept.
    assert list(tmp_path.glob("*.stacks.txt")) == []


@pytest.mark.parametrize("failures", [2, 3])
def test_a_look_that_fails_is_made_again_before_it_is_given_up(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    tool, looks = tmp_path / "py-spy", tmp_path / "looks"
    tool.write_text(
        f"#!/bin/sh\necho x >> {looks}\n"
        f"[ $(wc -l < {looks}) -gt {failures} ] && echo 'train_step (train.py:6)' && exit 0\n"
        "echo 'Error: Failed to get stack traces' >&2\nexit 1\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(py_spy, "find", lambda: str(tool))
    (chunk,) = answers(tmp_path, [worker], stacks=True)
    text = agents_pb2.RankStacks.FromString(chunk.data).text
    assert ("train_step (train.py:6)" in text) is (failures == 2)
    assert ("py-spy dump --nonblocking: Error: Failed to get" in text) is (failures == 3)


def test_other_ranks_and_jobs_are_not_looked_at(worker: Worker, tmp_path: Path) -> None:
    assert answers(tmp_path, [worker], "other", stacks=True) == []
    assert answers(tmp_path, [worker], stacks=True, rank=1) == []
