"""Exports what workers write, line by line, to where OTLP goes.

Each log is read on from where it was, a bounded piece at each look; a worker that writes faster
than that has its oldest lines counted and left out. What a worker wrote last is read after its end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from controller.agent.config import AgentConfig
from controller.agent.observe.log_files import read_log
from controller.agent.threads import run_blocking
from controller.agent.workers.worker import Worker
from controller.otlp.export import start
from controller.otlp.queue import ExportQueue
from controller.otlp.records import Record

LOOK_PERIOD_S = 1.0
# Of one worker in one look.
MAX_BYTES = 256 * 1024
# A longer line is exported in parts.
MAX_LINE_BYTES = 16 * 1024
_COUNTED_BYTES = 1 << 20


@dataclass(slots=True)
class _Tail:
    """One worker's log, and how far it was exported."""

    path: Path
    attributes: dict[str, str | int]
    offset: int = 0
    begun: bytes = b""
    # Lines that came too fast; to be counted once.
    num_left_out: int = 0

    def new_lines(self, *, is_over: bool) -> list[bytes]:
        """Whole lines since the last call, and with `is_over` the last one, whole or not."""
        try:
            end = os.stat(self.path).st_size
        except OSError:
            return []
        if end - self.offset > MAX_BYTES:
            self._leave_out(end - MAX_BYTES)
        begin, data = read_log(self.path, self.offset, MAX_BYTES)
        if begin != self.offset:
            self.begun = b""
        self.offset = begin + len(data)
        *lines, self.begun = (self.begun + data).split(b"\n")
        while len(self.begun) >= MAX_LINE_BYTES or (is_over and self.begun):
            lines.append(self.begun[:MAX_LINE_BYTES])
            self.begun = self.begun[MAX_LINE_BYTES:]
        return lines

    def _leave_out(self, until: int) -> None:
        """Count the lines up to there, and some beyond: the next one begins after them."""
        self.begun = b""
        is_line_start = False
        while not is_line_start:
            begin, data = read_log(self.path, self.offset, _COUNTED_BYTES)
            if not data:
                return
            if begin + len(data) >= until:
                newline = data.find(b"\n", max(0, until - begin))
                data = data[: newline + 1] if newline >= 0 else data
                is_line_start = True
            self.num_left_out += data.count(b"\n")
            self.offset = begin + len(data)


class LogExport:
    """The export of one agent; does nothing where nothing is to be exported."""

    def __init__(self, config: AgentConfig, workers: Callable[[], Iterable[Worker]]) -> None:
        """`workers` are those that run, and those that have ended and are not forgotten yet.

        Raises:
            OtlpError: logs are to be exported, and cannot be.
        """
        self._node = config.node
        self._workers = workers
        known = {"outlast.node": config.node}
        self.queue = start("outlast-agent", config.otlp_endpoint, os.environ, known)
        self._tails: dict[Path, _Tail] = {}
        # Those of which all was exported.
        self._over: set[Path] = set()
        # A look goes on in its thread when the agent ends.
        self._lock = Lock()

    async def run(self) -> None:
        """Look for as long as the agent lives."""
        while True:
            if self.queue is not None:
                known = {each.paths.log: (each, each.is_running) for each in self._workers()}
                await run_blocking(partial(self.look, known), "log export")
            await asyncio.sleep(LOOK_PERIOD_S)

    def look(self, known: dict[Path, tuple[Worker, bool]]) -> None:
        """Export what is new, once: of workers by their logs, and whether they run."""
        queue = self.queue
        assert queue is not None, "there is somewhere to export to"
        with self._lock:
            # One that was forgotten has a log of another attempt if it comes again.
            self._over &= known.keys()
            for path in known.keys() - self._over - self._tails.keys():
                self._tails[path] = _Tail(path, self._attributes(known[path][0]))
            for path, tail in list(self._tails.items()):
                is_over = path not in known or not known[path][1]
                self._export(queue, tail, is_over=is_over)
                if is_over:
                    del self._tails[path]
                    self._over.add(path)

    def close(self) -> None:
        """Export what is left, if that can be done in a moment."""
        if self.queue is not None:
            self.look({})
            self.queue.close()

    def _export(self, queue: ExportQueue, tail: _Tail, *, is_over: bool) -> None:
        lines = tail.new_lines(is_over=is_over)
        if tail.num_left_out:
            queue.left_out(tail.num_left_out)
            tail.num_left_out = 0
        # Within a look, like all times of logs.
        at_ns = time.time_ns()
        for line in lines:
            body = line.decode(errors="replace")
            queue.put(Record(at_ns=at_ns, body=body, scope="worker", attributes=tail.attributes))

    def _attributes(self, worker: Worker) -> dict[str, str | int]:
        return {
            "outlast.job": worker.job_id,
            "outlast.attempt": worker.attempt,
            "outlast.node": self._node,
            "outlast.rank": worker.rank,
        }
