"""The agent's end of the standby process: start it, ask it for workers, restart it.

The standby imports torch, so that the agent need not. If it dies, running
workers go on: the agent is their subreaper, learns their end from pidfds, and
hands them over to the next standby, which would kill them if the agent died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.agent.processes import wait_gone
from outlast.errors import RetryableError

logger = logging.getLogger(__name__)

# A fork takes 10 ms or so; a standby that needs this long is stopped or starved for good.
FORK_TIMEOUT_S = 10.0
_RESTART_DELAYS_S = (0.0, 0.5, 2.0, 10.0)

# One thread per library: a child forked after a parallel operation would hang, and
# results must not depend on how many cores a node has. TCPStore asks for the name
# of every peer: without these limits a lost DNS reply stalls a start for 5 seconds.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "PYTHONUNBUFFERED": "1",
}

# glibc asks for huge pages where the kernel gives them on request: a new worker touches tens
# of megabytes for the first time, which costs a fault for every 4 KiB otherwise (50 ms of a
# restart's 500 on a CPU). What somebody has tuned stays as it is.
_TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def standby_environment(given: Mapping[str, str], *, is_loopback: bool) -> dict[str, str]:
    """What a standby process and its workers find in their environment."""
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if is_loopback else {}
    return {**_TUNABLES, **given, **_ENVIRONMENT, **interface}


class StandbyError(RetryableError):
    """The standby process could not fork a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A worker that has just come to life."""

    pid: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEvents:
    """What the supervisor wants to hear."""

    started: Callable[[], None]
    """A standby process was started; its pid is new."""
    died: Callable[[], None]
    """It is gone; workers go on."""
    exited: Callable[[str, int], None]
    """A worker (key) ended with a wait status."""
    running: Callable[[], Iterable[tuple[str, int]]]
    """Workers (key, pid) that live now, for a new standby to take over."""


class StandbyLink:
    """One standby process at a time, for as long as the agent lives."""

    def __init__(
        self,
        *,
        arguments: tuple[str, ...],
        rendezvous_fd: int,
        is_loopback: bool,
        log_path: Path,
        events: StandbyEvents,
    ) -> None:
        self._arguments = arguments
        self._rendezvous_fd = rendezvous_fd
        self._is_loopback = is_loopback
        self._log_path = log_path
        self._events = events
        self._ready = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forks: dict[str, asyncio.Future[Forked]] = {}
        self._task: asyncio.Task[None] | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the standby process that runs now."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process in the background, and again whenever it ends."""
        self._task = asyncio.create_task(self._keep_running(), name="standby")

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when forks can be served; StandbyError after `timeout_s`."""
        if self._ready.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise StandbyError(
                f"the standby process was not ready after {timeout_s:.0f} s; see {self._log_path}"
            ) from error

    async def fork(self, key: str, assignment: Mapping[str, object]) -> Forked:
        """A new worker.

        Raises:
            StandbyError: the standby refused, died or did not answer.
        """
        if self._writer is None or not self._ready.is_set():
            raise StandbyError(f"worker {key}: the standby process is not ready")
        waiting: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._forks[key] = waiting
        self._tell(op="fork", key=key, assignment=assignment)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await waiting
        except TimeoutError as error:
            # It may be stopped; a worker it forks later would be nobody's.
            self._kill()
            raise StandbyError(
                f"worker {key}: no answer from the standby process in {FORK_TIMEOUT_S:.0f} s"
            ) from error
        finally:
            self._forks.pop(key, None)

    async def stop(self, timeout_s: float) -> None:
        """End the process, and with it every worker that it still watches."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        process = self._process
        if process is None:
            return
        if self._writer is not None:
            self._tell(op="exit")
            self._writer.close()
        try:
            async with asyncio.timeout(timeout_s):
                await wait_gone(process.pid)
        except TimeoutError:
            process.kill()
        process.wait()
        self._process = None

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(_RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)])
            was_ready = await self._run_once()
            self.num_restarts += 1
            # One that was ready did nothing wrong in starting.
            failures = 0 if was_ready else failures + 1

    async def _run_once(self) -> bool:
        """Run one process until it ends; whether it ever was ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._process = self._spawn(theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        self._writer = writer
        self._events.started()
        was_ready = False
        try:
            while line := await reader.readline():
                was_ready = self._hear(json.loads(line)) or was_ready
        except ConnectionError as error:
            logger.debug("standby socket: %s", error)
        # Its end of the socket is closed: whatever it is still doing is of no use.
        self._ready.clear()
        self._writer = None
        writer.close()
        process.kill()
        await wait_gone(process.pid)
        code = process.wait()
        self._process = None
        logger.warning("standby process ended: pid=%d code=%d", process.pid, code)
        for key, waiting in self._forks.items():
            if not waiting.done():
                waiting.set_exception(StandbyError(f"worker {key}: the standby process died"))
        self._events.died()
        return was_ready

    def _spawn(self, control: socket.socket) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "trainer.standby"),
            *("--control-fd", str(control.fileno())),
            *("--rendezvous-fd", str(self._rendezvous_fd)),
            *self._arguments,
        ]
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                env=standby_environment(os.environ, is_loopback=self._is_loopback),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(control.fileno(), self._rendezvous_fd),
            )

    def _hear(self, event: dict[str, object]) -> bool:
        """Handle one message; whether it says ready."""
        key = str(event.get("key", ""))
        match event["event"]:
            case "ready":
                for worker, pid in self._events.running():
                    self._tell(op="adopt", key=worker, pid=pid)
                self._ready.set()
                logger.info("standby process ready: pid=%s", event["pid"])
                return True
            case "forked":
                waiting = self._forks.get(key)
                if waiting is not None and not waiting.done():
                    forked = Forked(pid=_integer(event, "pid"), at_ns=_integer(event, "at_ns"))
                    waiting.set_result(forked)
            case "refused":
                waiting = self._forks.get(key)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(StandbyError(f"worker {key}: {event['detail']}"))
                # It can never fork again; its children are ours when it is gone.
                self._kill()
            case "exited":
                self._events.exited(key, _integer(event, "status"))
            case unknown:
                raise ValueError(f"message from the standby process: unknown event {unknown!r}")
        return False

    def _tell(self, **request: object) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(request).encode() + b"\n")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _integer(event: Mapping[str, object], name: str) -> int:
    value = event[name]
    assert isinstance(value, int), event
    return value
