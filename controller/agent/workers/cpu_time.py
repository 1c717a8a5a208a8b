"""CPU time of a worker and everything that it has started.

What does not belong here: what it says about the worker (`diagnostics.core.activity`).
"""

from __future__ import annotations

import os
from pathlib import Path

from controller.agent.workers.processes import child_pids, stat_of

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Places in `stat_of`: utime, stime, cutime and cstime. The last two are of children that ended
# and were waited for.
_TIMES = slice(11, 15)


def cpu_time_s(pid: int, cgroup: Path | None) -> float | None:
    """Seconds so far of a process and its descendants; None where they cannot be read.

    `cgroup` is the worker's own, if it has one: it counts all that ever ran in it. Else the
    process tree is summed up, without descendants whose parent has ended before them.
    """
    found = None if cgroup is None else _of_cgroup(cgroup)
    try:
        return _of_tree(pid) if found is None else found
    except (OSError, ValueError):
        return None


def _of_cgroup(cgroup: Path) -> float | None:
    try:
        for line in (cgroup / "cpu.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "usage_usec":
                return int(value) / 1e6
    except (OSError, ValueError):
        return None
    return None


def _of_tree(pid: int) -> float | None:
    ticks = _ticks_of(pid)
    if ticks is None:
        return None
    # Pids are reused, even while we read.
    seen = {pid}
    waiting = [pid]
    while waiting:
        for child in child_pids(waiting.pop()):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
                ticks += _ticks_of(child) or 0
    return ticks / _TICKS_PER_S


def _ticks_of(pid: int) -> int | None:
    fields = stat_of(pid)
    return None if fields is None else sum(int(field) for field in fields[_TIMES])
