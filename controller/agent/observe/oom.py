"""Whom the kernel killed for want of memory, by the counts that it keeps.

The count of a worker's memory cgroup, version 2 or 1, is of the processes in it, whatever
they were killed for: its own limit, or the node's. Where a worker is in none that counts,
the node's count says only that somebody was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from controller.agent.observe.metrics.host import number_table
from controller.agent.workers.cgroup_paths import folder_of, groups_of
from diagnostics.core.oom import KillCount

_NODE = "proc/vmstat"
_FILES = {"cgroup": "memory.oom_control", "cgroup2": "memory.events"}


def count_of(path: Path) -> int | None:
    """The count of kills in one of the kernel's tables; None where it has none."""
    try:
        return number_table(path.read_text()).get("oom_kill")
    except OSError:
        return None


def count_of_node(root: Path) -> int | None:
    """Processes killed since the machine began; `root` is where /proc is."""
    return count_of(root / _NODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """A process, the file whose count it is in, and since when."""

    path: Path
    since_s: float


class OomKills:
    """The workers of this node, and the counts that they are in."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._counts: dict[Path, KillCount] = {}
        self._watched: dict[str, _Watched] = {}

    def began(self, key: str, pid: int) -> None:
        """There is a new worker."""
        groups = groups_of(self._root, str(pid)) or groups_of(self._root, "self")
        group = _group_file(self._root, groups)
        path = group or self._root / _NODE
        # What was counted before was not this one.
        self._look_at(path)
        self._watched[key] = _Watched(path=path, since_s=self._clock())

    def look(self) -> None:
        """Take in the counts, so that a rise is known to be old when it is."""
        paths = {watched.path for watched in self._watched.values()}
        for path in paths:
            self._look_at(path)
        for path in self._counts.keys() - paths:
            del self._counts[path]

    def ended(self, key: str, *, was_killed: bool) -> str:
        """Forget a worker; which count says that it was killed for want of memory, if one does.

        `was_killed` says that it ended by SIGKILL, and not by ours.
        """
        watched = self._watched.pop(key, None)
        if watched is None or not was_killed:
            return ""
        self._look_at(watched.path)
        count = self._counts.get(watched.path)
        if count is None or not count.explains(watched.since_s):
            return ""
        if watched.path == self._root / _NODE:
            whose = "this node, perhaps another one: its cgroup has no count"
        else:
            whose = "its cgroup"
        file = _printable(watched.path.relative_to(self._root))
        return (
            "for want of memory the kernel has killed one more process of "
            f"{whose} (oom_kill of /{file} is {count.count})"
        )

    def _look_at(self, path: Path) -> None:
        count = count_of(path)
        if count is None:
            return
        if path in self._counts:
            self._counts[path].look(count, self._clock())
        else:
            self._counts[path] = KillCount(count)


def _printable(path: Path) -> str:
    return os.fsencode(path).decode(errors="replace")


def _group_file(root: Path, groups: list[str]) -> Path | None:
    """The table of the memory cgroup among `groups` that has the count; None if none has."""
    # A machine may have both versions mounted, and then memory is in one of them.
    for version, name in _FILES.items():
        where = folder_of(root, groups, version)
        if where is None:
            continue
        # A group without a memory controller of its own is counted in one above it.
        inside = (
            above
            for above in (where.folder, *where.folder.parents)
            if above.is_relative_to(where.mounted)
        )
        found = next((above / name for above in inside if count_of(above / name) is not None), None)
        if found is not None:
            return found
    return None
