"""Steps of the controller's wall clock, and journals that were written during one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from controller.clock import SteadyClock
from controller.core.changes import JobPut, NodePut
from controller.core.events import ControllerStarted
from controller.core.machine import Machine
from controller.core.records import JobRecord
from controller.core.settings import Settings
from controller.core.states import JobState
from tests.controller.edge.bench import Bench, bench

HOUR_S, DAY_S = 3_600.0, 86_400.0
STEPS_S = (HOUR_S, -HOUR_S, DAY_S, -DAY_S)


class Wall:
    """A wall clock that is set, and a monotonic one that can be moved on."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.passed_s = 0.0

    def wall_s(self) -> float:
        return time.time() + self.step_s + self.passed_s

    def monotonic_s(self) -> float:
        return time.monotonic() + self.passed_s


def _job(found: Bench) -> JobRecord:
    (job,) = found.service.state.jobs.values()
    return job


async def _until_state(found: Bench, state: JobState) -> None:
    for _ in range(50_000):
        if found.service.state.jobs and _job(found).state is state:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never {state}: {_job(found)}")


@pytest.mark.parametrize("step_s", STEPS_S)
def test_step_of_the_wall_clock_neither_ends_nor_freezes_a_deadline(
    tmp_path: Path, step_s: float
) -> None:
    async def scenario() -> None:
        wall = Wall()
        clock = SteadyClock(wall=wall.wall_s, monotonic=wall.monotonic_s)
        async with bench(tmp_path, clock) as found:
            await _until_state(found, JobState.RUNNING)
            # A start whose first step nobody reports.
            for stream in found.streams:
                stream.reports_progress = False
            sender = found.streams[0].sender
            found.streams[0].send(sender.own_exit())
            await _until_state(found, JobState.STARTING)
            attempt = _job(found).attempt
            limit_s = _job(found).plan.first_step_timeout_s
            wall.step_s = step_s
            # Looked at again and again, it is neither over nor further away.
            for _ in range(200):
                await found.service.tell()
            assert (_job(found).state, _job(found).attempt) == (JobState.STARTING, attempt)
            deadline_s = _job(found).deadline_s
            assert deadline_s is not None
            assert 0.0 < deadline_s - found.service.now_s <= limit_s
            # It ends when its time has passed, by a tenth more at most.
            wall.passed_s = 1.2 * limit_s
            for _ in range(2_000):
                await asyncio.sleep(0.001)
                if _job(found).attempt > attempt or _job(found).state is not JobState.STARTING:
                    break
            else:
                raise AssertionError("the deadline never came")
            samples = {
                sample.name: sample.value
                for family in found.metrics.collect()
                for sample in family.samples
            }
            assert samples["outlast_controller_clock_steps_total"] == 1
            assert abs(samples["outlast_controller_clock_offset_seconds"]) > HOUR_S / 2

    asyncio.run(scenario())


@pytest.mark.parametrize("ahead_s", [HOUR_S, DAY_S, 40 * 365 * DAY_S])
def test_deadlines_of_a_journal_that_was_ahead_are_brought_back(
    tmp_path: Path, ahead_s: float
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until_state(found, JobState.RUNNING)
            job = _job(found)
            now_s = found.service.now_s
            ahead = replace(
                job, state=JobState.STARTING, since_s=now_s + ahead_s, deadline_s=now_s + ahead_s
            )
            node = replace(
                next(iter(found.service.state.nodes.values())),
                timer_s=now_s + ahead_s,
                quarantines_s=(now_s + ahead_s,),
            )
            found.journal.append([JobPut(job=ahead), NodePut(node=node)])
            settings = Settings()
            machine = Machine(found.journal.load(), settings)
            machine.handle(ControllerStarted(term=2), now_s)
            known = machine.state.jobs[job.job_id]
            longest_s = job.plan.first_step_timeout_s
            assert known.deadline_s == pytest.approx(min(now_s + ahead_s, now_s + longest_s))
            assert known.since_s == now_s
            known_node = machine.state.nodes[node.node]
            assert known_node.timer_s is not None
            assert known_node.timer_s <= now_s + settings.abandon_s
            assert known_node.quarantines_s == (now_s,)

    asyncio.run(scenario())
