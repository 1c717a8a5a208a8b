"""Memory that this machine, or the container that we are in, lets processes use."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

# Both versions say "no limit" by a number or a word that no machine has.
_LARGEST_LIMIT_BYTES = 1 << 60
_LIMIT_FILES = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
# Beside each limit: what is used, and how much of that the kernel takes back when it must.
_USAGE_FILES = {
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
    "memory.max": ("memory.current", "inactive_file"),
}


def most_host_memory_bytes(memory_dir: Path, root: Path = Path("/")) -> int:
    """The most that checkpoints in host memory can take: the file system, or less memory."""
    total = shutil.disk_usage(memory_dir).total
    memory = memory_bytes(root)
    return min(total, memory) if memory else total


def free_bytes(folder: Path) -> int:
    """What can be allocated here, by the file system and by machine's and container's memory.

    A tmpfs may be larger than the memory behind it, and allocating past that does not
    fail: the kernel kills somebody instead.
    """
    free = shutil.disk_usage(folder).free
    memory = free_memory_bytes()
    return free if memory is None else min(free, memory)


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory that processes here may use: the machine's, or less by a cgroup; 0 if unknown."""
    limits = [limit for limit in _limits(root) if limit < _LARGEST_LIMIT_BYTES]
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemTotal":
                limits.append(int(value.split()[0]) << 10)
    except OSError:
        pass
    return min(limits, default=0)


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can still be taken: the machine's, or less by a cgroup; None if unknown."""
    found = [
        max(0, limit - _used(file))
        for file, limit in _limit_files(root)
        if limit < _LARGEST_LIMIT_BYTES
    ]
    available = _number(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        found.append(available << 10)
    return min(found, default=None)


def held_bytes(folders: Sequence[Path]) -> int:
    """Memory that the files below these folders take."""
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*")]
    total = 0
    for path in files:
        # Files come and go while we look.
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _used(limit_file: Path) -> int:
    usage_file, reclaimable = _USAGE_FILES[limit_file.name]
    try:
        used = int(limit_file.with_name(usage_file).read_text())
    except (OSError, ValueError):
        return 0
    return used - (_number(limit_file.with_name("memory.stat"), reclaimable) or 0)


def _number(table: Path, name: str) -> int | None:
    """The number behind a name in one of the kernel's tables."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        match line.split():
            case [found, number, *_] if found == name and number.isdecimal():
                return int(number)
    return None


def _limits(root: Path) -> Iterator[int]:
    return (limit for _, limit in _limit_files(root))


def _limit_files(root: Path) -> Iterator[tuple[Path, int]]:
    """Limits of the cgroup that we are in and of those around it, of both versions."""
    try:
        groups = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if "memory" in controllers.split(","):
            mount, file = mount / "memory", _LIMIT_FILES["cgroup"]
        elif not controllers:
            file = _LIMIT_FILES["cgroup2"]
        else:
            continue
        # In a container our group is often mounted at the root, whatever its name is outside.
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            path_here = mount / group / file
            try:
                limit = int(path_here.read_text())
            except (OSError, ValueError):
                continue
            yield path_here, limit
