"""What a step of a job uses: from its ranks' heartbeats to what clients see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.rpc.use import step_use
from outlast.v1 import agents_pb2, common_pb2, jobs_pb2
from tests.controller.fakes import DEADLINE_S, lab


def summary(
    job_id: str, rank: int, *, attempt: int = 1, waited_s: float = 0.0
) -> agents_pb2.RankSummary:
    """A rank of a pipeline whose actions take 0.6 s of a step."""
    return agents_pb2.RankSummary(
        job_id=job_id,
        attempt=attempt,
        rank=rank,
        completed_step=1,
        use=agents_pb2.RankUse(
            split=common_pb2.StepSplit(forward_s=0.2, backward_s=0.4, pp_exposed_s=waited_s),
            pipeline_busy_s=0.6,
            pipeline_waited_s=waited_s,
            peak_memory_bytes=1000 + rank,
            expected_memory_bytes=2000 - rank,
            expected_bubble=1 / 3,
        ),
    )


def test_ranks_are_put_together() -> None:
    found = step_use([summary("a", 0, waited_s=0.3), summary("a", 1, waited_s=0.1)])
    assert found is not None
    assert found.split.forward_s == pytest.approx(0.2)
    assert found.split.pp_exposed_s == pytest.approx(0.2)
    # The last stage idles for 0.2 s after its last action, which it does not tell.
    assert found.bubble == pytest.approx(1 / 3)
    assert found.expected_bubble == pytest.approx(1 / 3)
    assert (found.peak_memory_bytes, found.expected_memory_bytes) == (1001, 2000)


def test_before_the_first_step_nothing_is_known() -> None:
    assert step_use([]) is None
    assert step_use([agents_pb2.RankSummary(job_id="a", rank=0)]) is None


def test_a_running_job_says_what_its_last_steps_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()

            async def job() -> jobs_pb2.Job:
                return (await bench.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id))).job

            assert not (await job()).HasField("step_use")
            # What is told of an older attempt says nothing of this one.
            await first.heartbeat(summary(job_id, 0, attempt=0))
            await second.heartbeat(summary(job_id, 1, waited_s=0.3))
            async with asyncio.timeout(DEADLINE_S):
                while not (found := await job()).HasField("step_use"):
                    await asyncio.sleep(0.02)
            assert found.step_use.bubble == pytest.approx(1 / 3)
            assert found.step_use.peak_memory_bytes == 1001

    asyncio.run(scenario())
