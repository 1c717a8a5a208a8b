"""Reads what running workers write, notes when, and tells of lines that a rule knows.

Each file is read once, some of it at a time: a worker that writes without end costs the
agent no more than the bound of a look, and what lies further back is left out. A log that has grown
too long loses its older part then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from controller.agent.observe.log_files import trim
from controller.agent.observe.log_times import LogTimes
from controller.agent.workers.worker import Worker
from diagnostics.core.worker_log import Match, known_lines

# Of one worker in one look.
MAX_BYTES = 256 * 1024
# A line that has no end is none.
_MAX_LINE_BYTES = 16 * 1024


@dataclass(slots=True)
class _Tail:
    """How far a log was read, and the line that it had begun by then."""

    path: Path
    offset: int = 0
    begun: bytes = b""

    def new_lines(self, max_log_bytes: int) -> list[str]:
        """Whole lines since the last call, of the newest `MAX_BYTES`."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                if end > self.offset:
                    LogTimes(self.path).note(end, os.fstat(file.fileno()).st_mtime)
                if end < self.offset:
                    # The file system has no holes, and the log begins anew.
                    self.offset, self.begun = end, b""
                if end - self.offset > MAX_BYTES:
                    self.offset, self.begun = end - MAX_BYTES, b""
                file.seek(self.offset)
                content = file.read(end - self.offset)
            if end > max_log_bytes:
                trim(self.path, max_log_bytes)
        except OSError:
            return []
        self.offset += len(content)
        *lines, begun = (self.begun + content).split(b"\n")
        self.begun = begun[-_MAX_LINE_BYTES:]
        return [line.decode(errors="replace") for line in lines]


class WorkerLogs:
    """The logs of a node's workers, from the first line of each on."""

    def __init__(
        self, workers: Callable[[], Iterable[Worker]], max_log_bytes: int = sys.maxsize
    ) -> None:
        self._workers = workers
        self._max_log_bytes = max_log_bytes
        self._tails: dict[str, _Tail] = {}

    def look(self) -> list[tuple[Worker, Match]]:
        """What is new since the last look, with whose it is."""
        workers = {worker.key: worker for worker in self._workers()}
        self._tails = {
            key: self._tails.get(key) or _Tail(worker.paths.log) for key, worker in workers.items()
        }
        return [
            (workers[key], match)
            for key, tail in self._tails.items()
            for match in known_lines(tail.new_lines(self._max_log_bytes))
        ]
