"""Standby processes of a test process, without an agent."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from controller.agent.mistakes import Mistakes
from controller.agent.workers.forked_program import Program
from controller.agent.workers.processes import become_subreaper
from controller.agent.workers.standby_events import StandbyError, StandbyEvents
from controller.agent.workers.standby_link import StandbyLink

FAST = ("--entry=tests.agent.entry:run", "--preload=")
_PR_SET_CHILD_SUBREAPER = 36


@asynccontextmanager
async def running(
    folder: Path,
    *arguments: str,
    died: Callable[[], None] = lambda: None,
    exited: Callable[[str, int], None] = lambda key, status: None,
) -> AsyncIterator[tuple[StandbyLink, Mistakes]]:
    """A standby process of this test process."""
    mistakes = Mistakes()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link = StandbyLink(
            arguments=(*FAST, *arguments),
            rendezvous_fd=listening.fileno(),
            interface="lo",
            log_path=folder / "standby.log",
            events=StandbyEvents(
                started=lambda: None,
                died=died,
                exited=exited,
                running=lambda: (),
            ),
            mistakes=mistakes,
        )
        link.start()
        try:
            yield link, mistakes
        finally:
            await link.stop(5.0)


class NoStandby:
    """Where nothing can be forked."""

    async def run(self, program: Program) -> int:
        raise StandbyError(f"{program.module}: there is no standby process")


@contextmanager
def inheriting() -> Iterator[None]:
    """Have this process inherit the orphans below it, as an agent does."""
    become_subreaper()
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
