"""One worker as the agent knows it: where its files are, how it lives, how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controller.agent.processes import has_ended, send_signal
from outlast import blackbox
from outlast.v1 import agents_pb2

# How a worker ends that was told to: killed, before it could listen, or gracefully.
_STOPPED_CODES = (-signal.SIGKILL, -signal.SIGTERM, 75)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPaths:
    """Files of one worker, below the folder of its attempt."""

    log: Path
    error: Path
    blackbox: Path
    environment: Path

    @classmethod
    def below(cls, attempt_dir: Path, rank: int) -> WorkerPaths:
        stem = f"rank-{rank:05d}"
        return cls(
            log=attempt_dir / f"{stem}.log",
            error=attempt_dir / f"{stem}.error.json",
            blackbox=attempt_dir / f"{stem}.blackbox",
            environment=attempt_dir / f"{stem}.environment.json",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentNote:
    """What a rank wrote of its numeric environment when it started.

    `skipped` are checkpoints that its attempt could not load: step and reason.
    """

    environment: Mapping[str, str]
    changes: tuple[str, ...]
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class Worker:
    """A worker from the request to fork it until its job is forgotten."""

    job_id: str
    attempt: int
    rank: int
    paths: WorkerPaths
    # When the start command came in.
    requested_ns: int
    gone: asyncio.Future[None]
    # Of the pipeline.
    stage: int = 0
    pid: int | None = None
    pidfd: int | None = None
    forked_ns: int = 0
    # The strongest signal that the agent has sent or will send once there is a process.
    stopped_by: signal.Signals | None = None
    exit: agents_pb2.WorkerExit | None = None
    _reader: blackbox.Reader | None = field(default=None)

    @property
    def key(self) -> str:
        """What the worker is called between agent and standby process."""
        return f"{self.job_id}/{self.attempt}/{self.rank}"

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

    def black_box(self) -> blackbox.Reader | None:
        """The rank's black box, once it has opened one."""
        if self._reader is None:
            try:
                self._reader = blackbox.Reader(self.paths.blackbox)
            except (FileNotFoundError, ValueError):
                return None
        return self._reader

    def present(self) -> blackbox.Present | None:
        """Where the rank stands, once it has said anything."""
        reader = self.black_box()
        return None if reader is None else reader.present()

    def close(self) -> None:
        """Let go of the process and its black box."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def post_mortem(
    worker: Worker, code: int, *, out_of_memory: str, max_text_bytes: int, stderr_tail_bytes: int
) -> agents_pb2.WorkerExit:
    """Everything that a dead worker has left behind about its end.

    `out_of_memory` is what the kernel's counts have to say about it.
    """
    report = _read_object(worker.paths.error)
    present = worker.present()
    at_s = report.get("at_s")
    return agents_pb2.WorkerExit(
        code=code,
        exception_type=_text(report, "type", max_text_bytes),
        exception_message=_text(report, "message", max_text_bytes),
        traceback=_text(report, "traceback", max_text_bytes),
        at_s=float(at_s) if isinstance(at_s, int | float) else time.time(),
        stderr_tail=tail(worker.paths.log, stderr_tail_bytes).decode(errors="replace"),
        completed_step=-1 if present is None else present.completed_step,
        last_op="" if present is None else present.last_op,
        stopped=worker.stopped_by is not None and code in _STOPPED_CODES,
        out_of_memory=out_of_memory,
    )


def read_environment(path: Path) -> EnvironmentNote:
    """What a rank wrote before its first step; nothing where the file is not what it should be."""
    document = _read_object(path)
    environment, changes = document.get("environment"), document.get("changes")
    skipped = document.get("skipped")
    return EnvironmentNote(
        environment={str(name): str(value) for name, value in environment.items()}
        if isinstance(environment, dict)
        else {},
        changes=tuple(map(str, changes)) if isinstance(changes, list) else (),
        skipped=tuple(_skipped_steps(skipped)),
    )


def _skipped_steps(document: object) -> Iterator[tuple[int, str]]:
    for item in document if isinstance(document, list) else ():
        match item:
            case [int(step), str(why)]:
                yield step, why


def tail(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a file; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return file.read(num_bytes)
    except FileNotFoundError:
        return b""


def _read_object(path: Path) -> Mapping[str, object]:
    # The worker may have died as it wrote this; half a report is no report.
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(report: Mapping[str, object], name: str, max_bytes: int) -> str:
    """The end of a text, where a traceback has its point."""
    return str(report.get(name, "")).encode()[-max_bytes:].decode(errors="replace")
