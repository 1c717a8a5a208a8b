"""Looks at the node itself: memory, disks, and what its kernel and its workers write.

What is found is an event, so that none is lost while there is no controller. Where a
container has less memory than the machine, the container's counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from controller.agent.core.buffer import Weight
from controller.agent.observe.metrics.host import Folders, number_table
from controller.agent.observe.oom import OomKills, count_of_node
from controller.agent.observe.worker_logs import WorkerLogs
from controller.agent.workers.worker import Worker
from diagnostics.core.host import HostState, HostWatch, known_lines
from outlast.clock import node_time_s, wall_ahead_s
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 5.0
# One read of /dev/kmsg is one line; a storm of them must not keep the agent busy.
_MAX_LINES = 200
_LINE_BYTES = 8192
# What NTP corrects at once; less is slewed, which the monotonic clock follows.
_CLOCK_STEP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usage:
    total: int
    free: int


class KernelLog:
    """Lines that the kernel writes from now on; none where they may not be read."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._handle, 0, os.SEEK_END)
        except OSError:
            self.close()

    def new_lines(self) -> list[str]:
        """Lines since the last call."""
        lines: list[str] = []
        while self._handle is not None and len(lines) < _MAX_LINES:
            try:
                record = os.read(self._handle, _LINE_BYTES)
            except BrokenPipeError:
                # Older lines were overwritten before we came; the next read goes on.
                continue
            except OSError:
                # There are no more yet, or they cannot be read now.
                break
            if not record:
                break
            # `level,number,time,flags;text`, with lines of details after it.
            lines.append(record.decode(errors="replace").partition(";")[2].partition("\n")[0])
        return lines

    def close(self) -> None:
        if self._handle is not None:
            # The kernel lets go of it, whatever it says.
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None


def read_host(root: Path, folders: Folders, kernel_lines: list[str]) -> HostState:
    """The node as it is; `root` is where /proc and /sys are."""
    memory = number_table(_read(root / "proc/meminfo"))
    total = memory.get("MemTotal", 0)
    available = memory.get("MemAvailable", total) / total if total else 1.0
    cgroup = root / "sys/fs/cgroup"
    limit = _read(cgroup / "memory.max").strip()
    if limit.isdecimal() and int(limit):
        stat = number_table(_read(cgroup / "memory.stat"))
        # The kernel takes back what it only caches.
        current = _read(cgroup / "memory.current").strip()
        used = int(current if current.isdecimal() else 0) - stat.get("inactive_file", 0)
        available = min(available, max(0.0, 1.0 - used / int(limit)))
    named = {"state": folders.state_dir, "memory": folders.memory_dir, "data": folders.data_dir}
    usages = {name: usage for name, path in named.items() if (usage := _usage(path))}
    return HostState(
        memory_available=available,
        oom_kills=count_of_node(root) or 0,
        disks_free={name: usage.free / usage.total for name, usage in usages.items()},
        kernel=known_lines(kernel_lines),
    )


class Host:
    """The looks of one agent."""

    def __init__(
        self,
        folders: Folders,
        emit: Callable[[agents_pb2.AgentEvent, Weight], None],
        workers: Callable[[], Iterable[Worker]],
        oom_kills: OomKills,
        root: Path = Path("/"),
        max_log_bytes: int = sys.maxsize,
    ) -> None:
        self._folders = folders
        self._emit = emit
        self._oom_kills = oom_kills
        self._root = root
        self._watch = HostWatch()
        self._kernel_log = KernelLog(root / "dev/kmsg")
        self._worker_logs = WorkerLogs(workers, max_log_bytes)
        self._wall_ahead_s = wall_ahead_s()

    async def run(self) -> None:
        """Look for as long as the agent lives."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_PERIOD_S)

    def close(self) -> None:
        """Let go of the kernel's log."""
        self._kernel_log.close()

    def look(self) -> None:
        """Look once, and say what is new."""
        self._note_clock()
        self._oom_kills.look()
        state = read_host(self._root, self._folders, self._kernel_log.new_lines())
        for change in self._watch.take(state):
            sign = agents_pb2.HostSign(
                subject=change.subject,
                what=change.what,
                message=change.message,
                spares_node=change.spares_node,
            )
            event = agents_pb2.AgentEvent(at_s=node_time_s(), host_sign=sign)
            self._emit(event, Weight.LASTING)
        for worker, match in self._worker_logs.look():
            sign = agents_pb2.HostSign(
                subject=match.rule.means.cause,
                what=f"rank {worker.rank}",
                message=f"rank {worker.rank}: {match.message}",
                spares_node=not match.rule.means.blames_node,
            )
            event = agents_pb2.AgentEvent(
                job_id=worker.job_id, attempt=worker.attempt, at_s=node_time_s(), host_sign=sign
            )
            self._emit(event, Weight.LASTING)

    def _note_clock(self) -> None:
        """Log a step of the wall clock. Nothing here follows it; the controller corrects."""
        ahead_s = wall_ahead_s()
        step_s = ahead_s - self._wall_ahead_s
        if abs(step_s) > _CLOCK_STEP_S:
            logger.warning(
                "the wall clock stepped by %+.1f s: this node's times are %+.1f s off from it "
                "until the agent is started again",
                step_s,
                -ahead_s,
            )
            self._wall_ahead_s = ahead_s


def _usage(path: Path) -> _Usage | None:
    """None for a folder that is gone, or on a disk that has failed: others are still looked at."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return _Usage(total=usage.total, free=usage.free) if usage.total else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
