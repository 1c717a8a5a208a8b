"""An agent in a process of its own: what it asks of the kernel, and how it is asked to end."""

from __future__ import annotations

import asyncio

from controller.agent.agent import Agent
from controller.agent.config import AgentConfig
from controller.agent.state import AgentStateError
from controller.agent.workers.processes import become_subreaper, raise_open_files_limit
from outlast.startup import stop_signals


async def run_agent(config: AgentConfig) -> None:
    """Run an agent until SIGTERM, SIGINT or SIGHUP."""
    become_subreaper()
    raise_open_files_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    await make_agent(config).run(stop)


def make_agent(config: AgentConfig) -> Agent:
    """Make an agent inside a running event loop.

    Raises:
        AgentStateError: this machine does not give it what it needs.
    """
    try:
        return Agent(config)
    except (OSError, RuntimeError) as error:
        raise AgentStateError(
            f"the agent of {config.node} cannot start: {error}; look at the disks below its "
            "folders, and at the limits of open files and processes"
        ) from error
