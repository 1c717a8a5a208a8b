"""Has checks run on this node, by a child process that may hang, crash or talk nonsense.

`diagnostics.runner` needs torch and may suffer from a bad device; the agent must not. It is
forked from the standby process where that can be (`workers/programs`). It takes one order per
line and prints one finding per line. It is kept for a while after an order, because a run of
diagnostics has several for each node and importing torch, where it has to, takes seconds; it
is killed when it does not end in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from controller.agent.config import AgentConfig
from controller.agent.workers.programs import RunningProgram, Standby, start_program
from diagnostics.core.orders import Order
from outlast.errors import RetryableError
from outlast.v1 import diagnostics_pb2

logger = logging.getLogger(__name__)

# The runner keeps its own deadline and says which checks it did not reach; it is killed
# only when it fails at that. Importing torch on a busy node is part of it.
KILL_AFTER_S = 50.0
# Rounds of a run follow each other within seconds; between runs the memory is better free.
IDLE_S = 30.0
# Checks know nothing of how checkpoints are stored.
STORAGE_PROBE = "checkpoint.storage.probe"
_MAX_LINE_BYTES = 2**20
_MAX_FINDINGS = 10_000

OnFinding = Callable[[diagnostics_pb2.Finding], Awaitable[None]]
OnListening = Callable[[int], Awaitable[None]]
OnBegun = Callable[[], Awaitable[None]]


class SuiteError(RetryableError):
    """The checks themselves did not run, which says nothing about the node's health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlace:
    """What the runner must know of this node."""

    node: str
    workers: int
    state_dir: Path
    runner: str
    """Module that runs the checks."""

    @classmethod
    def of(cls, config: AgentConfig) -> SuitePlace:
        """The node of an agent with these options."""
        return cls(
            node=config.node,
            workers=config.workers,
            state_dir=config.state_dir,
            runner=config.suite_runner,
        )


@dataclass(slots=True, kw_only=True)
class _Runner:
    """A runner that waits for an order or carries one out."""

    program: RunningProgram
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport | None = None


class Suites:
    """One order at a time: two would measure each other."""

    def __init__(self, place: SuitePlace, standby: Standby) -> None:
        self._place = place
        self._standby = standby
        self._log_path = place.state_dir / "diagnostics.log"
        self._lock = asyncio.Lock()
        self._runner: _Runner | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """Of the runner, if there is one."""
        return None if self._runner is None else self._runner.program.pid

    async def run(
        self,
        order: Order,
        on_finding: OnFinding | None = None,
        on_listening: OnListening | None = None,
        on_begun: OnBegun | None = None,
    ) -> list[diagnostics_pb2.Finding]:
        """Every finding of an order; each is handed to `on_finding` as it comes.

        `on_begun` hears when its turn has come, `on_listening` where a host listens.

        Raises:
            SuiteError: the runner could not carry it out, or had to be killed.
        """
        async with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            if on_begun is not None:
                await on_begun()
            findings: list[diagnostics_pb2.Finding] = []
            is_whole = False
            try:
                # A standby process that is awaited, or does not answer, has deadlines of its own.
                runner = await self._ready()
                async with asyncio.timeout(order.deadline_s + KILL_AFTER_S):
                    await self._carry_out(runner, order, findings, on_finding, on_listening)
                is_whole = True
            except TimeoutError as error:
                raise SuiteError(
                    f"suite {order.suite}: did not end within {order.deadline_s:.0f} s, "
                    f"{len(findings)} findings so far; see {self._log_path}"
                ) from error
            finally:
                if is_whole:
                    self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)
                else:
                    await self._end()
            return findings

    async def close(self) -> None:
        """End the runner, whatever it is doing."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end()

    async def _ready(self) -> _Runner:
        """The runner that is there, or a new one."""
        if self._runner is not None and self._runner.program.is_running:
            return self._runner
        await self._end()
        place = self._place
        arguments = (
            "--orders",
            *("--node", place.node),
            *("--workers", str(place.workers)),
            *("--baseline-file", str(place.state_dir / "baseline.json")),
            *("--storage-probe", STORAGE_PROBE),
        )
        # It ends with its input, so with us.
        program = await start_program(self._standby, place.runner, arguments, self._log_path)
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        # Known before anything else is awaited: a child that nobody knows is killed as an orphan.
        runner = self._runner = _Runner(program=program, reader=reader)
        runner.transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), program.stdout
        )
        return runner

    async def _carry_out(
        self,
        runner: _Runner,
        order: Order,
        findings: list[diagnostics_pb2.Finding],
        on_finding: OnFinding | None,
        on_listening: OnListening | None,
    ) -> None:
        # It may just have ended: then the pipe is closed, and the missing answer says so.
        with contextlib.suppress(BrokenPipeError):
            os.write(runner.program.stdin.fileno(), order.to_json().encode() + b"\n")
        while line := await runner.reader.readline():
            document = _parse(line)
            if "done" in document:
                return
            if "listening" in document:
                if on_listening is not None:
                    await on_listening(int(str(document["listening"])))
                continue
            if len(findings) >= _MAX_FINDINGS:
                raise SuiteError(f"the runner printed more than {_MAX_FINDINGS} findings")
            finding = _finding(document)
            findings.append(finding)
            if on_finding is not None:
                await on_finding(finding)
        code = await runner.program.ended()
        raise SuiteError(
            f"suite {order.suite}: the runner ended with code {code}; see {self._log_path}"
        )

    def _end_idle(self) -> None:
        task = asyncio.create_task(self._end_if_idle())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_if_idle(self) -> None:
        if not self._lock.locked():
            await self._end()

    async def _end(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        await runner.program.kill()
        if runner.transport is not None:
            runner.transport.close()
        runner.program.close()


def _parse(line: bytes) -> dict[str, object]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _nonsense(line) from error
    if not isinstance(document, dict):
        raise _nonsense(line)
    return document


def _finding(document: dict[str, object]) -> diagnostics_pb2.Finding:
    try:
        return json_format.ParseDict(
            document, diagnostics_pb2.Finding(), ignore_unknown_fields=True
        )
    except json_format.ParseError as error:
        raise _nonsense(json.dumps(document).encode()) from error


def _nonsense(line: bytes) -> SuiteError:
    return SuiteError(f"the runner printed {line[:200]!r}, which is no finding")
