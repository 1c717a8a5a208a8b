"""Lines of workers that an agent exports by OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.agent.config import AgentConfig
from controller.agent.observe.log_export import MAX_BYTES, MAX_LINE_BYTES, LogExport
from controller.agent.workers.worker import Worker
from outlast.worker_contract import WorkerFiles
from tests.controller.otlp_receiver import Received, http_receiver


@pytest.fixture
def received() -> Iterator[Received]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    loop = asyncio.new_event_loop()
    try:
        return Worker(
            job_id="gpt-1",
            attempt=2,
            rank=3,
            paths=WorkerFiles.below(tmp_path, 3),
            requested_ns=0,
            gone=loop.create_future(),
        )
    finally:
        loop.close()


def export_of(received: Received, folder: Path) -> LogExport:
    config = AgentConfig(
        node="n7",
        controller="127.0.0.1:1",
        state_dir=folder,
        memory_dir=folder,
        data_dir=folder,
        workers=1,
        otlp_endpoint=received.url,
    )
    return LogExport(config, tuple)


def write(worker: Worker, text: str) -> None:
    with worker.paths.log.open("a") as file:
        file.write(text)


def test_lines_arrive_with_whose_they_are_and_the_last_one_though_it_never_ends(
    received: Received, worker: Worker, tmp_path: Path
) -> None:
    export = export_of(received, tmp_path)
    running = {worker.paths.log: (worker, True)}
    # It has not written yet.
    export.look(running)
    write(worker, "step 1\nste")
    export.look(running)
    write(worker, "p 2\nTraceback: gone")
    export.look(running)
    # It has ended, and is known until its job is over.
    export.look({worker.paths.log: (worker, False)})
    export.look({worker.paths.log: (worker, False)})
    export.look({})
    export.close()
    found = [each for each in received.records() if each[2] == "worker"]
    assert [body for body, *_ in found] == ["step 1", "step 2", "Traceback: gone"]
    for _, severity, _, attributes in found:
        assert severity == ""
        assert (
            attributes.items()
            >= {
                "service.name": "outlast-agent",
                "outlast.job": "gpt-1",
                "outlast.attempt": 2,
                "outlast.node": "n7",
                "outlast.rank": 3,
            }.items()
        )


def test_lines_of_a_worker_that_ended_between_two_looks_arrive_once(
    received: Received, worker: Worker, tmp_path: Path
) -> None:
    export = export_of(received, tmp_path)
    write(worker, "no such dataset\n")
    for _ in range(2):
        export.look({worker.paths.log: (worker, False)})
    export.close()
    assert [each[0] for each in received.records() if each[2] == "worker"] == ["no such dataset"]


def test_of_a_flood_the_newest_lines_are_exported_and_the_others_counted(
    received: Received, worker: Worker, tmp_path: Path
) -> None:
    export = export_of(received, tmp_path)
    assert export.queue is not None
    num_lines = 40_000
    write(worker, "".join(f"{number:099}\n" for number in range(num_lines)))
    export.look({worker.paths.log: (worker, True)})
    export.close()
    found = [body for body, _, scope, _ in received.records() if scope == "worker"]
    assert found[-1] == f"{num_lines - 1:099}"
    assert all(len(body) == 99 for body in found)
    assert len(found) <= MAX_BYTES // 100
    counts = export.queue.counts()
    assert counts["dropped"] + counts["exported"] == num_lines
    assert counts["exported"] == len(found)


def test_a_line_without_end_is_exported_in_parts(
    received: Received, worker: Worker, tmp_path: Path
) -> None:
    export = export_of(received, tmp_path)
    write(worker, "x" * (2 * MAX_LINE_BYTES + 5))
    export.look({worker.paths.log: (worker, True)})
    export.close()
    found = [len(body) for body, _, scope, _ in received.records() if scope == "worker"]
    assert found == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5]


def test_nothing_is_exported_where_nobody_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", raising=False)
    export = export_of(Received(), tmp_path)
    assert export.queue is None
    export.close()
