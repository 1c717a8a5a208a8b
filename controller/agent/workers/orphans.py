"""Processes that workers left behind: killed when their worker has ended, and reaped.

This agent is the subreaper of its node: a process whose parent has died becomes its child.
What stays in its worker's process group goes with the worker (`Supervisor`); what has left it,
as a daemon does, is found here. It is known by the worker's name in its environment, or, where
it has none (a fork that never called exec), when no worker runs any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.agent.workers.processes import child_pids, reap, stat_of
from controller.agent.workers.worker import Worker
from outlast.worker_contract import WORKER_MARK

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
_END_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orphan:
    pid: int
    is_dead: bool


class Orphans:
    """Children of this agent that it did not start."""

    def __init__(
        self, running: Callable[[], list[Worker]], own_pids: Callable[[], Iterator[int]]
    ) -> None:
        self._running = running
        self._own_pids = own_pids
        # Pids, at the last look.
        self._killed: set[int] = set()

    async def run(self) -> None:
        """Look for as long as the agent lives."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_PERIOD_S)

    def look(self) -> int:
        """Reap the dead, kill those whose worker has ended; how many both were."""
        running = {worker.fork_key for worker in self._running()}
        killed_before, self._killed = self._killed, set()
        num_ended = 0
        for orphan in list(self._found()):
            if orphan.is_dead:
                num_ended += 1
                reap(orphan.pid)
            elif not running or _mark_of(orphan.pid) not in ("", *running):
                num_ended += 1
                if orphan.pid not in killed_before:
                    logger.warning("killing what an ended worker left behind: pid=%d", orphan.pid)
                self._killed.add(orphan.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan.pid, signal.SIGKILL)
        return num_ended

    async def end(self, timeout_s: float) -> None:
        """Kill and reap what ended workers left; what hangs in the kernel is left behind."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        # Until there is none: the children of one that was killed are ours next.
        while self.look() and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_END_PAUSE_S)

    def _found(self) -> Iterator[_Orphan]:
        own = set(self._own_pids())
        workers = {worker.pid for worker in self._running()}
        for pid in child_pids():
            fields = stat_of(pid)
            if fields is None or pid in own or pid in workers:
                continue
            state, group = fields[0], int(fields[2])
            # Ours are in our group, or lead one that is known; workers always have their own.
            if group != os.getpgrp() and group not in own:
                yield _Orphan(pid=pid, is_dead=state in "ZX")


def _mark_of(pid: int) -> str:
    """The name of the worker below which a process was started; "" when it has none."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{WORKER_MARK}=".encode()
    marks = (entry.removeprefix(prefix) for entry in environment if entry.startswith(prefix))
    return next(marks, b"").decode(errors="replace")
