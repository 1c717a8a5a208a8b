"""What the agent tells of steps that rank 0's own agent may not have told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from controller.agent.core.buffer import Weight
from controller.agent.core.reports import LAST_STEPS_S, Reports
from controller.agent.observe.leftovers import left_steps
from controller.agent.observe.reporter import Reporter
from controller.agent.workers.worker import Worker
from outlast.blackbox import StepRecord, StepUse, Writer
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles

SECOND_NS = 10**9


def write_steps(attempt_dir: Path, rank: int, num_steps: int) -> None:
    """A black box of a rank that has completed a step every second."""
    attempt_dir.mkdir(parents=True, exist_ok=True)
    box = Writer(WorkerFiles.below(attempt_dir, rank).blackbox, rank=rank, world_size=2, attempt=1)
    for step in range(1, num_steps + 1):
        box.completed(
            StepRecord(
                step=step,
                loss=1.0 / step,
                grad_norm=1.0,
                learning_rate=0.1,
                tokens=8,
                start_ns=(step - 1) * SECOND_NS,
                end_ns=step * SECOND_NS,
                eval_loss=None,
            )
        )
    box.close()


def test_checkpoints_that_an_attempt_could_not_load_are_told_with_its_first_step(
    tmp_path: Path,
) -> None:
    paths = WorkerFiles.below(tmp_path, 0)
    write_steps(tmp_path, rank=0, num_steps=3)
    skipped = [[8, "a file is short"], "nonsense"]
    paths.environment.write_text(json.dumps({"skipped": skipped}))
    events: list[agents_pb2.AgentEvent] = []

    async def run() -> None:
        reporter = Reporter(lambda event, weight: events.append(event), lambda: True, Reports())
        worker = Worker(
            job_id="job",
            attempt=1,
            rank=0,
            paths=paths,
            requested_ns=0,
            gone=asyncio.get_running_loop().create_future(),
        )
        reporter.watch([worker])
        worker.exit = agents_pb2.WorkerExit(code=0)
        worker.gone.set_result(None)
        reporter.worker_ended(worker, is_last=True)
        worker.close()

    asyncio.run(run())
    troubles = [event for event in events if event.HasField("checkpoint_trouble")]
    assert [(told.job_id, told.attempt) for told in troubles] == [("job", 1)]
    trouble = troubles[0].checkpoint_trouble
    assert (trouble.step, trouble.stage, trouble.detail) == (8, "load", "a file is short")


def steps_told(events: list[agents_pb2.AgentEvent]) -> list[int]:
    return [report.step for event in events for report in event.step_reports.reports]


@pytest.mark.parametrize(
    ("is_connected", "told"), [(True, range(20 - int(LAST_STEPS_S), 21)), (False, range(1, 21))]
)
def test_end_of_a_rank_tells_what_rank_0_may_not_have_told(
    tmp_path: Path, is_connected: bool, told: range
) -> None:
    write_steps(tmp_path, rank=1, num_steps=20)
    events: list[agents_pb2.AgentEvent] = []

    async def run() -> None:
        def emit(event: agents_pb2.AgentEvent, weight: Weight) -> None:
            events.append(event)

        reporter = Reporter(emit, lambda: is_connected, Reports())
        worker = Worker(
            job_id="job",
            attempt=1,
            rank=1,
            paths=WorkerFiles.below(tmp_path, 1),
            requested_ns=0,
            gone=asyncio.get_running_loop().create_future(),
        )
        reporter.watch([worker])
        worker.exit = agents_pb2.WorkerExit(code=1)
        worker.gone.set_result(None)
        reporter.worker_ended(worker, is_last=True)
        worker.close()

    asyncio.run(run())
    assert steps_told(events) == list(told)


def test_step_that_the_job_does_not_have_is_left_out_and_later_ones_count(
    tmp_path: Path,
) -> None:
    reports = Reports()
    paths = WorkerFiles.below(tmp_path, 0)
    box = Writer(paths.blackbox, rank=0, world_size=1, attempt=1)
    events: list[agents_pb2.AgentEvent] = []

    def complete(step: int, *, tokens: int = 8) -> None:
        box.completed(
            StepRecord(
                step=step,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                tokens=tokens,
                start_ns=SECOND_NS,
                end_ns=2 * SECOND_NS,
                eval_loss=None,
            )
        )

    async def run() -> None:
        reporter = Reporter(lambda event, weight: events.append(event), lambda: True, reports)
        worker = Worker(
            job_id="job",
            attempt=1,
            rank=0,
            paths=paths,
            requested_ns=0,
            gone=asyncio.get_running_loop().create_future(),
            total_steps=60,
        )
        reporter.watch([worker])
        box.resumed(0)
        complete(2**40)
        complete(1, tokens=-1)
        reporter.look(10.0)
        assert not events
        complete(1)
        reporter.look(20.0)
        complete(2)
        reports.welcomed()
        reporter.look(30.0)
        assert worker.mistakes.counts == {"black box": 1}
        worker.close()

    asyncio.run(run())
    box.close()
    made = [event.progress.completed_step for event in events if event.HasField("progress")]
    assert made == [1, 2]
    assert steps_told(events) == [1, 2]


def test_parts_of_steps_come_with_the_last_of_a_look(tmp_path: Path) -> None:
    """As a mean of the ranks here: rank 1's forward passes take three times as long."""
    files = [WorkerFiles.below(tmp_path, rank) for rank in range(2)]
    boxes = [
        Writer(paths.blackbox, rank=rank, world_size=2, attempt=1)
        for rank, paths in enumerate(files)
    ]
    events: list[agents_pb2.AgentEvent] = []

    def complete(*steps: int) -> None:
        for step in steps:
            for box, times in zip(boxes, (1, 3), strict=True):
                box.used(
                    StepUse(
                        forward_ns=times * SECOND_NS,
                        backward_ns=0,
                        busy_ns=0,
                        waited_ns=0,
                        peak_memory_bytes=0,
                    )
                )
                record = StepRecord(
                    step=step,
                    loss=1.0,
                    grad_norm=1.0,
                    learning_rate=0.1,
                    tokens=8,
                    start_ns=SECOND_NS,
                    end_ns=2 * SECOND_NS,
                    eval_loss=None,
                )
                box.completed(record)

    async def run() -> None:
        reporter = Reporter(lambda event, weight: events.append(event), lambda: True, Reports())
        workers = [
            Worker(
                job_id="job",
                attempt=1,
                rank=rank,
                paths=paths,
                requested_ns=0,
                gone=asyncio.get_running_loop().create_future(),
                total_steps=60,
            )
            for rank, paths in enumerate(files)
        ]
        reporter.watch(workers)
        for box in boxes:
            box.resumed(0)
        complete(1, 2)
        reporter.look(10.0)
        complete(3)
        reporter.look(20.0)
        for worker in workers:
            worker.close()

    asyncio.run(run())
    for box in boxes:
        box.close()
    reports = [report for event in events for report in event.step_reports.reports]
    assert [report.step for report in reports] == [1, 2, 3]
    assert [report.HasField("split") for report in reports] == [False, True, True]
    assert [report.split.forward_s for report in reports[1:]] == pytest.approx([2.0, 2.0])


def test_new_agent_finds_the_steps_of_the_newest_attempt_of_jobs_not_forgotten(
    tmp_path: Path,
) -> None:
    jobs, memory = tmp_path / "jobs", tmp_path / "memory"
    write_steps(jobs / "job" / "a2", rank=3, num_steps=2)
    write_steps(jobs / "job" / "a10", rank=2, num_steps=4)
    write_steps(jobs / "job" / "a10", rank=3, num_steps=4)
    (jobs / "job" / "a10" / "rank-00001.blackbox").write_bytes(b"torn")
    write_steps(jobs / "forgotten" / "a1", rank=0, num_steps=4)
    (memory / "job").mkdir(parents=True)
    (found,) = left_steps(jobs, memory)
    assert (found.job_id, found.attempt) == ("job", 10)
    assert [record.step for record in found.records] == [1, 2, 3, 4]
    assert not list(left_steps(tmp_path / "none", memory))
