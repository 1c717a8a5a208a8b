"""One worker as the agent knows it: where its files are, how it lives, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from controller.agent.core.workers import WorkerKey
from controller.agent.files import tail
from controller.agent.mistakes import Mistakes
from controller.agent.workers.error_reports import ErrorReport, read_report
from controller.agent.workers.last_words import last_words
from controller.agent.workers.processes import has_ended, send_signal
from controller.operations import set_operation
from outlast import blackbox
from outlast.blackbox.records import MAX_COUNT
from outlast.clock import node_time_s, wall_ahead_s
from outlast.v1 import agents_pb2
from outlast.worker_contract import (
    STOP_SIGNAL,
    STOPPED_CODES,
    EnvironmentField,
    WorkerFiles,
)

# Of what a worker writes about its environment: ten times what it says.
_MAX_NOTES = 256
_MAX_NOTE_CHARS = 2_000
# Of a worker's report of its end; more is not read.
_MAX_REPORT_BYTES = 16 * 2**20

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentNote:
    """What a rank wrote of its numeric environment when it started.

    `skipped` are checkpoints that its attempt could not load: step and reason. `left_out` is
    what of the data source is not read, `num_samples` how many samples training has in one pass.
    """

    environment: Mapping[str, str]
    changes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    num_samples: int = 0
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class Worker:
    """A worker from the request to fork it until its job is forgotten."""

    job_id: str
    attempt: int
    rank: int
    paths: WorkerFiles
    # When the start command came in.
    requested_ns: int
    gone: asyncio.Future[None]
    # Of the pipeline.
    stage: int = 0
    # Of the job: a step beyond them is none.
    total_steps: int = MAX_COUNT
    # Of a script, what asks it to stop.
    stop_signal: signal.Signals = STOP_SIGNAL
    # Of a script that reports no steps: for how long it may show no sign of life. None: a worker
    # of the trainer.
    silent_limit_s: float | None = None
    # Its own, where the agent may make one.
    cgroup: Path | None = None
    # What the standby process calls the process: its key, or that of the first attempt that the
    # process took part in.
    fork_key: str = ""
    # The process has left the attempt, and lives for the next one.
    is_kept: bool = False
    pid: int | None = None
    pidfd: int | None = None
    forked_ns: int = 0
    # The strongest signal that the agent has sent or will send once there is a process.
    stopped_by: signal.Signals | None = None
    exit: agents_pb2.WorkerExit | None = None
    mistakes: Mistakes = field(default_factory=Mistakes)
    _reader: blackbox.Reader | None = field(default=None)
    _is_closed: bool = False

    @property
    def key(self) -> str:
        """What the worker is called between agent and standby process."""
        return f"{self.job_id}/{self.attempt}/{self.rank}"

    @property
    def identity(self) -> WorkerKey:
        """What the worker is called inside the agent."""
        return WorkerKey(self.job_id, self.attempt, self.rank)

    @property
    def has_process(self) -> bool:
        """Whether there is one, or is about to be."""
        return self.is_running or self.is_kept

    @property
    def is_script(self) -> bool:
        """Whether it is a program of the user's own."""
        return self.silent_limit_s is not None

    @property
    def is_running(self) -> bool:
        """Whether there is, or is about to be, a process."""
        return not self.gone.done()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, or see to it that it is signalled as soon as it exists."""
        if self.pidfd is not None and has_ended(self.pidfd):
            # Its end is news that we have not heard yet, and not our doing.
            return
        if self.stopped_by is not signal.SIGKILL:
            self.stopped_by = number
        if self.pidfd is not None:
            send_signal(self.pidfd, number)

    def open_pidfd(self, pid: int) -> bool:
        """Take hold of the process; False when it has ended and been reaped already."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if self.stopped_by is not None:
            send_signal(self.pidfd, self.stopped_by)
        return True

    def take_over(self, kept: Worker) -> None:
        """Become what the process of a worker that has left does next."""
        self.pid, self.pidfd, self.cgroup = kept.pid, kept.pidfd, kept.cgroup
        self.fork_key = kept.fork_key
        kept.pidfd, kept.cgroup, kept.is_kept = None, None, False
        if self.stopped_by is not None and self.pidfd is not None:
            send_signal(self.pidfd, self.stopped_by)

    def black_box(self) -> blackbox.Reader | None:
        """The rank's black box, once it has opened one and until `close`."""
        if self._reader is None and not self._is_closed:
            try:
                self._reader = blackbox.Reader(self.paths.blackbox)
            except (FileNotFoundError, ValueError):
                return None
            except OSError as error:
                self.mistakes.note("black box", self.key, error)
                return None
        return self._reader

    def look(self, read: Callable[[blackbox.Reader], Found]) -> Found | None:
        """What `read` finds in the rank's black box; None where it cannot be read.

        Whatever a rank has written there, it is that rank's trouble alone.
        """
        reader = self.black_box()
        if reader is None:
            return None
        try:
            return read(reader)
        except Exception as error:  # noqa: BLE001  # a damaged worker must not end its node's agent
            self.mistakes.note("black box", self.key, error)
            return None

    def present(self) -> blackbox.Present | None:
        """Where the rank stands, once it has said anything."""
        return self.look(blackbox.Reader.present)

    def close(self, *, with_process: bool = True) -> None:
        """Let go of its black box, and of the process."""
        # The kernel lets go of a descriptor, whatever it says.
        if with_process and self.pidfd is not None:
            with contextlib.suppress(OSError):
                os.close(self.pidfd)
            self.pidfd = None
        # Whoever still knows the worker would open its box again, and nobody close it.
        self._is_closed = True
        if self._reader is not None:
            with contextlib.suppress(OSError):
                self._reader.close()
            self._reader = None


def bare_exit(worker: Worker, code: int) -> agents_pb2.WorkerExit:
    """The end of a worker, without anything that it left behind."""
    return agents_pb2.WorkerExit(
        code=code,
        at_s=node_time_s(),
        completed_step=-1,
        # A script that is asked to stop ends with whatever code it likes.
        stopped=worker.stopped_by is not None and (worker.is_script or code in STOPPED_CODES),
    )


def post_mortem(
    worker: Worker, code: int, *, out_of_memory: str, max_text_bytes: int, stderr_tail_bytes: int
) -> agents_pb2.WorkerExit:
    """Everything that a dead worker has left behind about its end.

    `out_of_memory` is what the kernel's counts have to say about it.
    """
    log = tail(worker.paths.log, max(max_text_bytes, stderr_tail_bytes))
    report = read_report(_read_object(worker.paths.error))
    if report is None:
        report = last_words(log.decode(errors="replace"), code) or ErrorReport()
    present = worker.present()
    found = bare_exit(worker, code)
    found.exception_type = _end_of(report.exception_type, max_text_bytes)
    found.exception_message = _end_of(report.message, max_text_bytes)
    found.traceback = _end_of(report.traceback, max_text_bytes)
    found.at_s = _ended_at_s(report, worker.paths.error)
    found.stderr_tail = log[max(0, len(log) - stderr_tail_bytes) :].decode(errors="replace")
    found.out_of_memory = out_of_memory
    if present is not None:
        found.completed_step = present.completed_step
        set_operation(found, present.last_operation)
    return found


def read_environment(path: Path) -> EnvironmentNote:
    """What a rank wrote before its first step; nothing where the file is not what it should be."""
    document = _read_object(path)
    environment = document.get(EnvironmentField.ENVIRONMENT)
    named = environment.items() if isinstance(environment, dict) else ()
    return EnvironmentNote(
        environment={_note(name): _note(value) for name, value in islice(named, _MAX_NOTES)},
        changes=_notes(document.get(EnvironmentField.CHANGES)),
        left_out=_notes(document.get(EnvironmentField.LEFT_OUT)),
        num_samples=_count(document.get(EnvironmentField.NUM_SAMPLES)),
        skipped=tuple(islice(_skipped_steps(document.get(EnvironmentField.SKIPPED)), _MAX_NOTES)),
    )


def _notes(lines: object) -> tuple[str, ...]:
    given = lines if isinstance(lines, list) else ()
    return tuple(_note(line) for line in islice(given, _MAX_NOTES))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if 0 <= value <= MAX_COUNT else 0


def _note(value: object) -> str:
    return _printable(str(value))[:_MAX_NOTE_CHARS]


def _skipped_steps(document: object) -> Iterator[tuple[int, str]]:
    for item in document if isinstance(document, list) else ():
        match item:
            case [int(step), str(why)] if 0 <= step <= MAX_COUNT:
                yield step, _note(why)


def _ended_at_s(report: ErrorReport, path: Path) -> float:
    """When a worker wrote that it ended, or now where that is not known."""
    if report.at_s is not None:
        return report.at_s
    if report.wall_s is None:
        return node_time_s()
    wall_s = report.wall_s
    # Its file is written at once, and has the fraction of the second: of two ranks that fail in
    # one second, the first one is looked for.
    with contextlib.suppress(OSError):
        wall_s = min(max(wall_s, path.stat().st_mtime), wall_s + 1.0)
    return max(0.0, wall_s - wall_ahead_s())


def _read_object(path: Path) -> Mapping[str, object]:
    # The worker may have died as it wrote this; half a report is no report.
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_REPORT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _end_of(text: str, max_bytes: int) -> str:
    """The end of a text, where a traceback has its point."""
    return _printable(text).encode()[-max_bytes:].decode(errors="replace")


def _printable(text: str) -> str:
    """Half a surrogate pair is valid in JSON, and in no message."""
    return text.encode(errors="replace").decode()


async def signal_and_wait(workers: list[Worker], number: signal.Signals, timeout_s: float) -> None:
    """Signal those that run and wait until all are gone or the time is up."""
    waiting = [worker.gone for worker in workers if worker.is_running]
    for worker in workers:
        if worker.has_process:
            worker.signal(number)
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)
