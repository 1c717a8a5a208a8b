"""Where the cgroups of a process are, by the kernel's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupFolder:
    """A cgroup's folder, and where its hierarchy is mounted."""

    mounted: Path
    folder: Path


def table_lines(path: Path) -> list[str]:
    """Lines of a table that has names in it, which may be any bytes; none if it is not there."""
    try:
        text = path.read_text(errors="surrogateescape")
    except OSError:
        return []
    # Not `splitlines`: a name may have what ends a line elsewhere.
    return [line for line in text.split("\n") if line]


def groups_of(root: Path, process: str) -> list[str]:
    """The cgroups that a process is in; none if it has gone, or says nothing."""
    return table_lines(root / "proc" / process / "cgroup")


def folder_of(root: Path, groups: Sequence[str], version: str) -> CgroupFolder | None:
    """The folder of the cgroup among `groups` of version "cgroup2", or "cgroup" with memory.

    None where there is none, or where it is not mounted in our sight.
    """
    mounts = table_lines(root / "proc/self/mountinfo")
    group, where = _group_of(groups, version), _mounted(mounts, version)
    # Some paths lead out of what a container sees.
    if group is None or where is None or ".." in group.parts:
        return None
    top, mount = where
    if not group.is_relative_to(top):
        return None
    mounted = root / mount.lstrip("/")
    return CgroupFolder(mounted=mounted, folder=mounted / group.relative_to(top))


def _group_of(groups: Sequence[str], version: str) -> PurePosixPath | None:
    """The path of a process's memory cgroup, from lines of `number:controllers:path`."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        # Version 2 names no controllers there.
        if "memory" in controllers.split(",") if version == "cgroup" else not controllers:
            return PurePosixPath(path)
    return None


def _mounted(mounts: Sequence[str], version: str) -> tuple[str, str] | None:
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
