"""Commands in one turn of the agent's loop, which a real stream shows too rarely."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from controller.agent.commands import Commands
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer
from controller.agent.core.ledger import CommandLedger
from controller.agent.core.machine import AgentMachine
from controller.agent.mistakes import Mistakes
from controller.agent.order_steps import Parts
from controller.agent.supervisor import Supervisor
from outlast.v1 import agents_pb2
from tests.agent.harness import start_command, stop_command


class NoWorkers:
    """A supervisor that has nothing to stop."""

    async def wait_for_families(self) -> None:
        pass


def test_start_that_is_stopped_before_its_first_step_is_answered(tmp_path: Path) -> None:
    told: dict[str, agents_pb2.CommandResult] = {}

    def emit(event: agents_pb2.AgentEvent, weight: object) -> None:
        told[event.command_result.command_id] = event.command_result

    config = AgentConfig(
        node="n0",
        controller="",
        state_dir=tmp_path,
        memory_dir=tmp_path,
        data_dir=tmp_path,
        workers=2,
    )
    unused: Any = None
    parts = Parts(
        config=config,
        supervisor=cast("Supervisor", NoWorkers()),
        uploads=unused,
        replicas=unused,
        suites=unused,
        rendezvous_fd=-1,
        storage_awaited=unused,
        mistakes=Mistakes(),
    )

    async def run() -> None:
        loop = asyncio.get_running_loop()
        commands = Commands(
            parts,
            AgentMachine(CommandLedger(), EventBuffer(10), now_s=loop.time()),
            emit=emit,
            send_events=lambda: None,
            save_ledger=lambda ledger: None,
        )
        start, stop = start_command(1, command_id="start"), stop_command(1)
        stop.command_id = "stop"
        # Both came in one read: the start's task has not run yet.
        commands.receive(start)
        commands.receive(stop)
        async with asyncio.timeout(10):
            while len(told) < 2:
                await asyncio.sleep(0)
        # Another time it is known, too.
        told.clear()
        commands.receive(start)
        assert told["start"].error_kind == "stale"
        await commands.close()

    asyncio.run(run())
    assert "stopped before this was done" in told["start"].detail
