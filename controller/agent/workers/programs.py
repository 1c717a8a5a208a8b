"""Programs beside the workers: a child of ours with pipes for its input and output.

One that needs torch starts as a fork of the standby process, which has imported it; where
there is no standby that can fork, as an interpreter of its own. Either way it leads a process
group, is ours to reap, and has the same environment.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from controller.agent.workers.environment import program_environment
from controller.agent.workers.forked_program import Program
from controller.agent.workers.processes import reap_group, wait_gone
from controller.agent.workers.standby_events import StandbyError
from outlast import private
from outlast.startup import python_command

logger = logging.getLogger(__name__)


class Standby(Protocol):
    """What forks programs, as `StandbyLink.run` does."""

    async def run(self, program: Program) -> int: ...


class Child(Protocol):
    """A child of ours, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@dataclass(slots=True)
class Inherited:
    """A child of ours that another process has forked."""

    pid: int
    _code: int | None = None

    def poll(self) -> int | None:
        """The return code, if it has ended."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """The return code, when it has ended."""
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                # Somebody else has reaped it, and nobody can say how it ended.
                self._code = -signal.SIGKILL
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A program that has been started; it leads a process group."""

    child: Child

    @property
    def pid(self) -> int:
        """Of its process, and of the group that it leads."""
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.child.poll() is None

    async def ended(self) -> int:
        """Wait for its end; the return code."""
        await wait_gone(self.pid)
        return self.child.wait()

    async def kill(self) -> None:
        """Kill its whole group, unless it has ended by itself, and reap what is left."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
            await self.ended()
            logger.info("program killed: pid=%d", self.pid)
        await reap_group(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProgram(Started):
    """A program with our ends of its pipes."""

    stdin: io.FileIO
    stdout: io.FileIO

    def close(self) -> None:
        """Let go of the pipes."""
        for pipe in (self.stdin, self.stdout):
            _close(pipe)


async def start_program(
    standby: Standby, module: str, arguments: Sequence[str], log_path: Path
) -> RunningProgram:
    """Start a module of ours; what it prints as errors is added to a log.

    Nothing is awaited between the moment when it leads its group and the return.

    Raises:
        OSError: it cannot be started.
    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        log = private.open_to_append(log_path)
        theirs.callback(_close, log)
        their_stdin, our_stdin = _pipe(theirs, ours)
        our_stdout, their_stdout = _pipe(ours, theirs)
        streams = (their_stdin.fileno(), their_stdout.fileno(), log.fileno())
        child = await start_child(standby, module, arguments, streams)
        ours.pop_all()
        return RunningProgram(child=child, stdin=our_stdin, stdout=our_stdout)


async def start_child(
    standby: Standby, module: str, arguments: Sequence[str], streams: tuple[int, int, int]
) -> Child:
    """Start a module of ours with these descriptors as its standard input, output and error.

    Nothing is awaited between the moment when it leads its group and the return.

    Raises:
        OSError: it cannot be started.
    """
    environment = program_environment(os.environ)
    program = Program(module=module, arguments=arguments, environment=environment, streams=streams)
    try:
        return Inherited(await standby.run(program))
    except StandbyError as error:
        logger.info("%s starts without the standby process: %s", module, error)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [*python_command(module), *arguments],
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
    )


def _pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Both ends of a new pipe, each closed by the stack of who has it."""
    read, write = os.pipe()
    reader, writer = io.FileIO(read, "rb"), io.FileIO(write, "wb")
    reads.callback(_close, reader)
    writes.callback(_close, writer)
    return reader, writer


def _close(file: IO[bytes] | io.FileIO) -> None:
    # The kernel lets go of it, whatever it says.
    with contextlib.suppress(OSError):
        file.close()
