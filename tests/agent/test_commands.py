"""Commands in one turn of the agent's loop, which a real stream shows too rarely."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from controller.agent.addresses import Controllers
from controller.agent.commands import Commands
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer
from controller.agent.core.ledger import CommandLedger
from controller.agent.core.machine import AgentMachine
from controller.agent.core.workers import WorkerKey
from controller.agent.mistakes import Mistakes
from controller.agent.order_steps import Parts
from controller.agent.workers.orphans import Orphans
from controller.agent.workers.supervisor import Supervisor
from controller.agent.workers.worker import Worker
from outlast.v1 import agents_pb2
from outlast.worker_contract import STOP_SIGNAL
from tests.agent.harness import start_command, stop_command


class Workers:
    """A supervisor whose workers end when they are told to."""

    def __init__(self) -> None:
        self.commands: Commands | None = None
        self.running: list[Worker] = []
        self.signals: list[signal.Signals] = []
        self.num_waits = 0

    def signal(self, keys: Iterable[WorkerKey], number: signal.Signals) -> None:
        assert self.commands is not None
        self.signals.append(number)
        for worker in self.running:
            self.commands.worker_ended(worker)

    def find(self, key: WorkerKey) -> Worker:
        return next(worker for worker in self.running if worker.identity == key)

    async def wait_for_families(self) -> None:
        self.num_waits += 1

    async def end(self, timeout_s: float) -> None:
        """Of what they left behind, which is nothing."""


@dataclass(frozen=True, kw_only=True)
class StartedWorker:
    """As much of a worker as the commands look at."""

    identity: WorkerKey
    pid: int = 4242
    exit: None = None
    is_kept: bool = False


def make_commands(
    tmp_path: Path, workers: Workers, told: dict[str, agents_pb2.CommandResult]
) -> Commands:
    """To be called in the agent's loop."""

    def emit(event: agents_pb2.AgentEvent, weight: object) -> None:
        told[event.command_result.command_id] = event.command_result

    unused: Any = None
    config = AgentConfig(
        node="n0",
        controller="127.0.0.1:1",
        state_dir=tmp_path,
        memory_dir=tmp_path,
        data_dir=tmp_path,
        workers=2,
    )
    parts = Parts(
        config=config,
        controllers=Controllers(config),
        supervisor=cast("Supervisor", workers),
        orphans=cast("Orphans", workers),
        uploads=unused,
        replicas=unused,
        suites=unused,
        rendezvous_fd=-1,
        store=unused,
        data_loaders=unused,
        storage_awaited=unused,
        mistakes=Mistakes(),
    )
    now_s = asyncio.get_running_loop().time()
    workers.commands = Commands(
        parts,
        AgentMachine(CommandLedger(), EventBuffer(10), now_s=now_s),
        emit=emit,
        report_end=lambda worker, is_last: 1,
        send_events=lambda: None,
        save_ledger=lambda ledger: None,
    )
    return workers.commands


def test_workers_without_a_controller_are_stopped_and_what_they_left_is_waited_for(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        workers = Workers()
        commands = make_commands(tmp_path, workers, {})
        worker = cast("Worker", StartedWorker(identity=WorkerKey("job", 1, 0)))
        workers.running = [worker]
        commands.workers_requested([worker])
        commands.worker_forked(worker)
        commands.welcomed(agents_pb2.Welcome(controller_absence_limit_s=0.01))
        commands.session_lost()
        async with asyncio.timeout(60):
            while not workers.num_waits:
                await asyncio.sleep(0.001)
        await commands.close()
        assert workers.signals == [STOP_SIGNAL]
        assert workers.num_waits == 1

    asyncio.run(run())


def test_start_that_is_stopped_before_its_first_step_is_answered(tmp_path: Path) -> None:
    told: dict[str, agents_pb2.CommandResult] = {}

    async def run() -> None:
        commands = make_commands(tmp_path, Workers(), told)
        start, stop = start_command(1, command_id="start"), stop_command(1)
        stop.command_id = "stop"
        # Both came in one read: the start's task has not run yet.
        commands.receive(start)
        commands.receive(stop)
        async with asyncio.timeout(60):
            while len(told) < 2:
                await asyncio.sleep(0)
        # Another time it is known, too.
        told.clear()
        commands.receive(start)
        assert told["start"].error_kind == "stale"
        await commands.close()

    asyncio.run(run())
    assert "stopped before this was done" in told["start"].detail


def test_checks_of_a_spare_end_where_a_job_starts_on_it(tmp_path: Path) -> None:
    told: dict[str, agents_pb2.CommandResult] = {}

    async def run() -> None:
        commands = make_commands(tmp_path, Workers(), told)
        checks = agents_pb2.RunSuite(suite="preflight", timeout_s=60.0)
        commands.receive(agents_pb2.Command(command_id="suite", run_suite=checks))
        start, stop = start_command(1, command_id="start"), stop_command(1)
        stop.command_id = "stop"
        commands.receive(start)
        commands.receive(stop)
        async with asyncio.timeout(60):
            while len(told) < 3:
                await asyncio.sleep(0)
        await commands.close()

    asyncio.run(run())
    assert told["suite"].error_kind == "stale"
    assert told["suite"].detail == "a job took the node before this was done"
