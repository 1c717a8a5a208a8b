"""The agent's end of the standby process: start it, ask it for workers, restart it.

The standby imports torch, so that the agent need not. If it dies, running
workers go on: the agent is their subreaper, learns their end from pidfds, and
hands them over to the next standby, which would kill them if the agent died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from controller.agent.files import last_words
from controller.agent.mistakes import Mistakes
from controller.agent.workers.environment import standby_environment
from controller.agent.workers.forked_program import Program
from controller.agent.workers.preload import Preload, preload_of_trainer
from controller.agent.workers.processes import how_ended, kill_stray, wait_gone
from controller.agent.workers.standby_events import Forked, StandbyError, StandbyEvents
from outlast import private
from outlast.worker_contract import WorkerContract

logger = logging.getLogger(__name__)

# A program is better off with a standby that is starting than beside it: both would import
# torch. Importing takes seconds, and much longer where many nodes share two cores.
READY_PATIENCE_S = 20.0
# A fork takes 10 ms or so; a standby that needs this long is stopped or starved for good.
FORK_TIMEOUT_S = 10.0
_RESTART_DELAYS_S = (0.0, 0.5, 2.0, 10.0)
# One that ends so soon after it was ready is started again without haste, too, from the third
# time on.
_SHORT_LIFE_S = 5.0
# A standby that could not start so often in a row will not in the time of a start command.
_FAILURES_TOLD = 2


class StandbyLink:
    """One standby process at a time, for as long as the agent lives."""

    def __init__(
        self,
        *,
        arguments: tuple[str, ...],
        rendezvous_fd: int,
        interface: str,
        log_path: Path,
        events: StandbyEvents,
        mistakes: Mistakes,
    ) -> None:
        self._arguments = arguments
        self._rendezvous_fd = rendezvous_fd
        self._interface = interface
        self._log_path = log_path
        self._events = events
        self._mistakes = mistakes
        self._ready = asyncio.Event()
        # Starts that wait for it.
        self._waiting: set[asyncio.Future[None]] = set()
        # Ends in a row of which none was ever ready, and why the last one ended.
        self._failures = 0
        self._cause = ""
        self._writer: asyncio.StreamWriter | None = None
        # Of the writer, which closes it.
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forks: dict[str, asyncio.Future[Forked]] = {}
        self._num_programs = 0
        self._preload = preload_of_trainer()
        # By module, why the process that runs now could not import it.
        self.left_out: Mapping[str, str] = {}
        self._is_installed = True
        self._task: asyncio.Task[None] | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the standby process that runs now."""
        return None if self._process is None else self._process.pid

    @property
    def is_of_one_job(self) -> bool:
        """Whether no other job may find what was imported: secrets could be read meanwhile, or
        the files are a user's, who may change them."""
        preload = self._preload
        return bool(preload.environment or preload.python) or not self._is_installed

    def start(self) -> None:
        """Start the process in the background, and again whenever it ends."""
        self._task = asyncio.create_task(self._keep_running(), name="standby")

    def use(self, preload: Preload) -> None:
        """Have the process import these; one that has imported others is started anew."""
        if preload == self._preload:
            return
        logger.info("standby process begins anew to import %s", preload.modules or "nothing else")
        self._preload, self._is_installed = preload, False
        # What failed with others says nothing of these.
        self._failures, self._cause = 0, ""
        self._ready.clear()
        self._kill()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when forks can be served.

        Raises:
            StandbyError: not after `timeout_s`, or it ends again and again; with the cause.
        """
        if self._ready.is_set():
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                await waiting
        except TimeoutError as error:
            before = f" The one before: {self._cause}." if self._cause else ""
            raise StandbyError(
                f"the standby process was not ready after {timeout_s:.0f} s.{before} "
                f"See {self._log_path}"
            ) from error
        finally:
            self._waiting.discard(waiting)

    async def fork(
        self, key: str, contract: WorkerContract, *, cgroup: Path | None = None
    ) -> Forked:
        """A new worker, in a cgroup if one is given.

        Raises:
            StandbyError: the standby refused, died or did not answer.
        """
        request = {"op": "fork", "contract": contract.to_env(), "cgroup": str(cgroup or "")}
        return await self._ask(key, f"worker {key}", request)

    async def run(self, program: Program) -> int:
        """Run a module in a fork that is our child, not the standby's, and leads a group; its pid.

        Waits for a standby that is starting. Nothing is awaited between the moment when the
        group is there and the return.

        Raises:
            StandbyError: the standby refused, died or did not answer, or cannot start.
        """
        module = self._preload.program(program.module)
        if module is None:
            raise StandbyError(f"{program.module}: the standby process is a script's own")
        if not self._failures:
            await self.wait_ready(READY_PATIENCE_S)
        self._num_programs += 1
        key = f"program {self._num_programs}"
        request = {"op": "run", "program": program.to_json(module, parent=os.getpid())}
        pid = (await self._ask(key, program.module, request, program.streams)).pid
        try:
            # Not before we know it: a group that nobody knows is killed as an orphan's.
            os.setpgid(pid, pid)
        except OSError as error:
            kill_stray(pid)
            raise StandbyError(f"{program.module}: no process group: {error}") from error
        return pid

    async def _ask(
        self, key: str, what: str, request: Mapping[str, object], descriptors: Sequence[int] = ()
    ) -> Forked:
        """Have the standby fork `what`."""
        if self._writer is None or not self._ready.is_set():
            raise StandbyError(f"{what}: the standby process is not ready")
        waiting: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._forks[key] = waiting
        try:
            self._tell(descriptors, **request, key=key)
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await waiting
        except asyncio.CancelledError:
            # It may have been answered in the same moment.
            is_answered = waiting.done() and not waiting.cancelled()
            if descriptors and is_answered and waiting.exception() is None:
                kill_stray(waiting.result().pid)
            raise
        except TimeoutError as error:
            # It may be stopped; what it forks later would be nobody's.
            self._kill()
            raise StandbyError(
                f"{what}: no answer from the standby process in {FORK_TIMEOUT_S:.0f} s"
            ) from error
        except StandbyError as error:
            raise StandbyError(f"{what}: {error}") from error
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
        """Never ends: a node without a standby process looks healthy and can start nothing."""
        short_lives = 0
        while True:
            delay = max(self._failures, short_lives - 2, 0)
            await asyncio.sleep(_RESTART_DELAYS_S[min(delay, len(_RESTART_DELAYS_S) - 1)])
            ready_s: float | None = None
            try:
                ready_s = await self._run_once()
            except Exception as error:  # noqa: BLE001  # no room, no processes, no descriptors, ...
                self._mistakes.note("standby", "could not be started or watched", error)
                self._cause = f"it could not be started: {error}"
                await self._clean_up()
            self.num_restarts += 1
            # One that was ready did nothing wrong in starting.
            self._failures = 0 if ready_s is not None else self._failures + 1
            lived_long = ready_s is None or time.monotonic() - ready_s >= _SHORT_LIFE_S
            short_lives = 0 if lived_long else short_lives + 1
            if self._failures >= _FAILURES_TOLD:
                self._refuse_starts()

    def _refuse_starts(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(
                    StandbyError(
                        f"the standby process, from which workers are forked, ended "
                        f"{self._failures} times before it was ready: {self._cause}. "
                        f"See {self._log_path}"
                    )
                )

    async def _run_once(self) -> float | None:
        """Run one process until it ends; when it was ready, None if it never was."""
        log_begin = self._log_path.stat().st_size if self._log_path.exists() else 0
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = self._process = self._spawn(theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
        except Exception:
            ours.close()
            raise
        self._writer, self._control = writer, ours
        self._events.started()
        ready_s = None
        try:
            while line := await reader.readline():
                if self._hear(json.loads(line)):
                    ready_s = time.monotonic()
        except ConnectionError as error:
            logger.debug("standby socket: %s", error)
        # Its end of the socket is closed: whatever it is still doing is of no use.
        code = await self._end(process)
        self._cause = f"{how_ended(code)}{last_words(self._log_path, log_begin)}"
        logger.warning("standby process ended: pid=%d %s", process.pid, self._cause)
        await self._clean_up()
        return ready_s

    async def _end(self, process: subprocess.Popen[bytes]) -> int:
        process.kill()
        await wait_gone(process.pid)
        return process.wait()

    async def _clean_up(self) -> None:
        """Let go of a standby that is of no more use; forks that it owes fail."""
        self._ready.clear()
        writer, self._writer, self._control = self._writer, None, None
        if writer is not None:
            writer.close()
        process = self._process
        if process is not None:
            await self._end(process)
            self._process = None
        for waiting in self._forks.values():
            if not waiting.done():
                waiting.set_exception(StandbyError(f"the standby process died: {self._cause}"))
        try:
            self._events.died()
        except Exception as error:  # noqa: BLE001  # its workers are looked for again next time
            self._mistakes.note("standby", "looking for workers that it left", error)

    def _open_log(self) -> IO[bytes] | int:
        try:
            return private.open_to_append(self._log_path)
        except OSError as error:
            # Workers have their own; one less is no reason to start none.
            self._mistakes.note("standby", "it runs without a log", error)
            return subprocess.DEVNULL

    def _spawn(self, control: socket.socket) -> subprocess.Popen[bytes]:
        command = [
            *self._preload.command(),
            *("--control-fd", str(control.fileno())),
            *("--rendezvous-fd", str(self._rendezvous_fd)),
            *self._arguments,
        ]
        with contextlib.ExitStack() as opened:
            log = self._open_log()
            if not isinstance(log, int):
                opened.enter_context(log)
            return subprocess.Popen(
                command,
                env=standby_environment(
                    self._preload.environment_of(os.environ), interface=self._interface
                ),
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
                left_out = event.get("left_out")
                self.left_out = left_out if isinstance(left_out, dict) else {}
                self._is_installed = event.get("is_installed") is True
                for module, why in self.left_out.items():
                    logger.warning("not imported before forks: %s: %s", module, why)
                self._ready.set()
                for ready in self._waiting:
                    if not ready.done():
                        ready.set_result(None)
                logger.info("standby process ready: pid=%s", event["pid"])
                return True
            case "forked" | "started" as kind:
                forked = Forked(pid=_integer(event, "pid"), at_ns=_integer(event, "at_ns"))
                waiting = self._forks.get(key)
                if waiting is not None and not waiting.done():
                    waiting.set_result(forked)
                elif kind == "started":
                    # The request for this program was cancelled.
                    kill_stray(forked.pid)
            case "refused" | "not_started" as kind:
                waiting = self._forks.get(key)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(StandbyError(str(event["detail"])))
                # Jobs do not lose it for a program that is started without it.
                if kind == "refused":
                    # It can never fork again; its children are ours when it is gone.
                    self._kill()
            case "exited":
                self._events.exited(key, _integer(event, "status"))
            case unknown:
                raise ValueError(f"message from the standby process: unknown event {unknown!r}")
        return False

    def _tell(self, descriptors: Sequence[int] = (), **request: object) -> None:
        assert self._writer is not None
        line = json.dumps(request).encode() + b"\n"
        if descriptors:
            line = line[self._send_descriptors(line, descriptors) :]
        self._writer.write(line)

    def _send_descriptors(self, line: bytes, descriptors: Sequence[int]) -> int:
        """Send them with the begin of a line; how many bytes of it."""
        assert self._writer is not None
        assert self._control is not None
        # A transport sends no descriptors; past one that still has to send, none may go.
        if self._writer.transport.get_write_buffer_size():
            raise StandbyError("the standby process does not read what it is asked")
        try:
            return socket.send_fds(self._control, [line], list(descriptors))
        except OSError as error:
            raise StandbyError(f"the standby process cannot be asked: {error}") from error

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _integer(event: Mapping[str, object], name: str) -> int:
    value = event[name]
    assert isinstance(value, int), event
    return value
