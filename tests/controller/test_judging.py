"""Judgements of hangs take a while, and the controller goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from controller.core.edge.edge import Edge
from controller.core.edge.judgement import HangJudgement
from controller.core.events import Detected, Event, JobStalled
from controller.core.records import JobRecord
from controller.core.states import JobState
from outlast.v1 import agents_pb2
from tests.controller.edge.bench import Bench, bench
from tests.controller.fakes import until


def _job(found: Bench) -> JobRecord:
    (job,) = found.service.state.jobs.values()
    return job


async def _trains(found: Bench, attempt: int) -> None:
    await until(
        lambda: (
            bool(found.service.state.jobs)
            and (_job(found).state, _job(found).attempt) == (JobState.RUNNING, attempt)
        ),
        f"attempt {attempt} trains",
    )


def _all_stand(found: Bench) -> None:
    """Every agent says that its rank stands for too long."""
    job = _job(found)
    for rank, node in enumerate(job.nodes):
        (stream,) = (each for each in found.streams if each.sender.node == node)
        summary = agents_pb2.RankSummary(
            job_id=job.job_id,
            attempt=job.attempt,
            rank=rank,
            phase="gradient_sync",
            completed_step=1,
            stalled_s=9.0,
            stall_limit_s=1.8,
        )
        beat = agents_pb2.Heartbeat(at_s=found.service.now_s, ranks=[summary])
        stream.send(agents_pb2.AgentMessage(heartbeat=beat))


async def _is_restarted_when_all_stand(tmp_path: Path) -> None:
    async with bench(tmp_path) as found:
        await _trains(found, 1)
        _all_stand(found)
        await _trains(found, 2)
        assert _job(found).attempt == 2


def test_the_loop_goes_on_while_a_hang_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    judge = HangJudgement.judge

    def slowly(self: HangJudgement) -> JobStalled | Detected:
        begun.set()
        may_end.wait()
        return judge(self)

    monkeypatch.setattr(HangJudgement, "judge", slowly)

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            try:
                await _trains(found, 1)
                _all_stand(found)
                await until(begun.is_set, "the hang is judged")
                # The loop takes in messages and makes decisions durable.
                num_taken = found.num_taken
                _all_stand(found)
                await until(lambda: found.num_taken == num_taken + 2, "heartbeats are read")
                await found.service.tell()
                assert (_job(found).state, _job(found).attempt) == (JobState.RUNNING, 1)
            finally:
                may_end.set()
            await _trains(found, 2)

    asyncio.run(scenario())


def test_a_job_whose_hang_cannot_be_judged_is_restarted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HangJudgement) -> JobStalled:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(HangJudgement, "judge", fail)

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _trains(found, 1)
            _all_stand(found)
            await _trains(found, 2)
            assert found.service.guard.counts["watch"] == 1
            (incident,) = found.service.state.incidents.values()
            assert "a mistake of ours" in incident.evidence[0].detail

    asyncio.run(scenario())


def test_a_mistake_after_the_judgement_does_not_lose_the_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Edge, judgement: HangJudgement, found: Event) -> list[Event]:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Edge, "judged", fail)
    asyncio.run(_is_restarted_when_all_stand(tmp_path))


def test_requests_that_wait_for_storage_do_not_hold_up_a_judgement(tmp_path: Path) -> None:
    async def scenario() -> None:
        may_end = threading.Event()
        waiting = [asyncio.create_task(asyncio.to_thread(may_end.wait)) for _ in range(64)]
        try:
            await _is_restarted_when_all_stand(tmp_path)
        finally:
            may_end.set()
            await asyncio.gather(*waiting)

    asyncio.run(scenario())
