"""A controller that dies on hearing of a checkpoint: before, in and after its journal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outlast.client import Client
from outlast.crashpoints import CrashPoint
from outlast.v1 import agents_pb2, jobs_pb2
from tests.controller.fakes import FakeAgent, spec_document, until
from tests.controller.processes import Controller, controller
from tests.crash.orders import DEADLINE_S, Orders

JOURNAL_POINTS = (CrashPoint.CHECKPOINT_HEARD, CrashPoint.CHANGES_DECIDED, CrashPoint.CHANGES_KEPT)
EFFECT_POINTS = (CrashPoint.EFFECTS_RUN,)
POINTS = (*JOURNAL_POINTS, *EFFECT_POINTS)
STEP = 4


class Scene:
    """A controller that obeys orders to die, two agents, and a job that runs on them."""

    def __init__(self, process: Controller) -> None:
        self.process = process
        self.address = process.grpc
        self.agents = [FakeAgent(f"n{number}", lambda: self.address) for number in range(2)]
        self.job_id = ""

    async def begin(self) -> None:
        for agent in self.agents:
            agent.start()
        await self._connected()
        with Client(self.address) as client:
            self.job_id = client.submit(spec_document()).job_id
        await until(lambda: all(agent.running for agent in self.agents), "workers run")
        for agent in self.agents:
            await agent.progress(STEP)
        await self.wait_job(lambda job: job.state == "RUNNING", "it runs")

    async def commit(self) -> int:
        """The node of rank 0 says that a checkpoint is in storage; the event's number."""
        return await self.agents[0].send(
            agents_pb2.AgentEvent(
                job_id=self.job_id,
                attempt=1,
                checkpoint_committed=agents_pb2.CheckpointCommitted(step=STEP, size_bytes=10),
            )
        )

    async def die_and_return(self) -> None:
        """The controller ends as it was ordered; another takes its place."""
        died = self.process.process
        assert died is not None
        assert await asyncio.to_thread(died.wait, DEADLINE_S) == -signal.SIGKILL
        await until(lambda: not any(agent.is_connected for agent in self.agents), "it is away")
        await asyncio.to_thread(self.process.start)
        self.address = self.process.grpc
        await self._connected()

    async def wait_job(self, holds: object, what: str) -> jobs_pb2.Job:
        def look() -> jobs_pb2.Job:
            with Client(self.address) as client:
                return client.get(self.job_id)[0]

        while not holds(job := await asyncio.to_thread(look)):  # type: ignore[operator]
            await asyncio.sleep(0.01)
        return job

    async def _connected(self) -> None:
        await until(lambda: all(agent.is_connected for agent in self.agents), "agents join")


@asynccontextmanager
async def scene(state_dir: Path) -> AsyncIterator[Scene]:
    with controller(state_dir) as process:
        made = Scene(process)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await made.begin()
                yield made
        finally:
            await asyncio.gather(*(agent.stop() for agent in made.agents))


@pytest.fixture
def obeying(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Orders:
    for name, value in orders.environment.items():
        monkeypatch.setenv(name, value)
    return orders


@pytest.mark.parametrize("point", JOURNAL_POINTS)
def test_a_commit_is_known_however_its_controller_dies(
    point: CrashPoint, tmp_path: Path, obeying: Orders
) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as it:
            obeying.give(point)
            sent = await it.commit()
            await it.die_and_return()
            # What was not acknowledged is sent again, and counts once.
            await until(lambda: it.agents[0].acked_seq >= sent, "the commit is taken in")
            job = await it.wait_job(lambda job: job.committed_step == STEP, "it knows the commit")
            assert (job.state, job.attempt, job.restarts) == ("RUNNING", 1, 0)

    asyncio.run(scenario())
    assert obeying.is_obeyed(point)


@pytest.mark.parametrize("point", EFFECT_POINTS)
def test_the_next_attempt_starts_from_the_commit_however_its_controller_dies(
    point: CrashPoint, tmp_path: Path, obeying: Orders
) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as it:
            sent = await it.commit()
            await until(lambda: it.agents[0].acked_seq >= sent, "the commit is taken in")
            obeying.give(point)
            await it.agents[1].exit(1, 1, step=STEP + 1)
            await it.die_and_return()
            await until(
                lambda: all(agent.last("start_workers").attempt == 2 for agent in it.agents),
                "the second attempt starts",
            )
            for agent in it.agents:
                assert agent.last("start_workers").start_workers.committed_step == STEP
                # However often it was sent: the same command.
                starts = [c for c in agent.commands if c.WhichOneof("kind") == "start_workers"]
                assert len({start.command_id for start in starts}) == 2
                # The checkpoints of both attempts are of one job.
                assert len({start.start_workers.owner for start in starts}) == 1

    asyncio.run(scenario())
    assert obeying.is_obeyed(point)
