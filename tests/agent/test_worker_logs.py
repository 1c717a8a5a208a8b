"""What an agent reads of the logs of its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.agent.observe.worker_logs import MAX_BYTES, WorkerLogs
from controller.agent.workers.worker import Worker
from outlast.worker_contract import WorkerFiles

LOST = "GPU is lost"


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    loop = asyncio.new_event_loop()
    try:
        return Worker(
            job_id="job",
            attempt=2,
            rank=3,
            paths=WorkerFiles.below(tmp_path, 3),
            requested_ns=0,
            gone=loop.create_future(),
        )
    finally:
        loop.close()


def messages(logs: WorkerLogs) -> list[str]:
    return [match.message.rpartition(": ")[2] for _, match in logs.look()]


def test_whole_lines_are_told_once_and_half_ones_when_they_are_whole(worker: Worker) -> None:
    logs = WorkerLogs(lambda: [worker])
    assert messages(logs) == []
    with worker.paths.log.open("a") as log:
        print(f"step 1\n{LOST} one\nGPU is", end="", file=log, flush=True)
        assert messages(logs) == [f"{LOST} one"]
        print(" lost two", file=log, flush=True)
        assert messages(logs) == [f"{LOST} two"]
    assert messages(logs) == []


def test_of_a_flood_the_newest_part_is_read(worker: Worker) -> None:
    logs = WorkerLogs(lambda: [worker])
    assert messages(logs) == []
    flood = f"{LOST} old\n" + "x" * 80 + "\n" + ("y" * 79 + "\n") * (2 * MAX_BYTES // 80)
    worker.paths.log.write_text(f"{flood}{LOST} new\n")
    assert messages(logs) == [f"{LOST} new"]


def test_a_worker_that_is_gone_is_forgotten(worker: Worker) -> None:
    workers = [worker]
    logs = WorkerLogs(lambda: workers)
    worker.paths.log.write_text(f"{LOST}\n")
    workers.clear()
    assert messages(logs) == []


def test_a_log_that_has_grown_too_long_is_shortened_and_its_new_lines_are_told(
    worker: Worker,
) -> None:
    logs = WorkerLogs(lambda: [worker], max_log_bytes=1 << 20)
    for number in range(4):
        with worker.paths.log.open("a") as log:
            print("a line of what a program has to say\n" * 60_000, file=log)
            print(f"{LOST} {number}", file=log)
        assert messages(logs) == [f"{LOST} {number}"]
        assert worker.paths.log.stat().st_blocks * 512 <= 1 << 20
    assert messages(logs) == []
