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
from pathlib import Path, PurePosixPath

from controller.agent.metrics.host import number_table
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
        groups = _groups(self._root, str(pid)) or _groups(self._root, "self")
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


def _lines(path: Path) -> list[str]:
    """Lines of a table that has names in it, which may be any bytes; none if it is not there."""
    try:
        text = path.read_text(errors="surrogateescape")
    except OSError:
        return []
    # Not `splitlines`: a name may have what ends a line elsewhere.
    return [line for line in text.split("\n") if line]


def _groups(root: Path, process: str) -> list[str]:
    """The cgroups that a process is in; none if it has gone, or says nothing."""
    return _lines(root / "proc" / process / "cgroup")


def _group_file(root: Path, groups: list[str]) -> Path | None:
    """The table of the memory cgroup among `groups` that has the count; None if none has."""
    mounts = _lines(root / "proc/self/mountinfo")
    # A machine may have both versions mounted, and then memory is in one of them.
    for version, name in _FILES.items():
        group, where = _group_of(groups, version), _mounted(mounts, version)
        # Some paths lead out of what a container sees.
        if group is None or where is None or ".." in group.parts:
            continue
        top, mount = where
        if not group.is_relative_to(top):
            continue
        mounted = root / mount.lstrip("/")
        folder = mounted / group.relative_to(top)
        # A group without a memory controller of its own is counted in one above it.
        inside = (above for above in (folder, *folder.parents) if above.is_relative_to(mounted))
        found = next((above / name for above in inside if count_of(above / name) is not None), None)
        if found is not None:
            return found
    return None


def _group_of(groups: list[str], version: str) -> PurePosixPath | None:
    """The path of a process's memory cgroup, from lines of `number:controllers:path`."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        # Version 2 names no controllers there.
        if "memory" in controllers.split(",") if version == "cgroup" else not controllers:
            return PurePosixPath(path)
    return None


def _mounted(mounts: list[str], version: str) -> tuple[str, str] | None:
    """Which cgroup is mounted where, of the hierarchy that may have memory."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        # Type, source, options; a source may be empty.
        file_system, *_, options = (*after.split(" "), "")[:3]
        is_memory = version == "cgroup2" or "memory" in options.split(",")
        if file_system == version and is_memory:
            _, _, _, top, mount = before.split(" ")[:5]
            return top, mount
    return None
