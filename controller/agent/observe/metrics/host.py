"""The machine below the agent, as /proc tells it.

Local nodes of one machine all tell the same. What does not belong here: devices
and links, which have modules of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from controller.agent.config import AgentConfig
from controller.families import Counter, Family, Gauge

CPU = Counter("outlast_host_cpu_seconds_total", "Time of all CPUs, by what they did", ("mode",))
MEMORY = Gauge("outlast_host_memory_size_bytes", "Memory of the machine")
AVAILABLE = Gauge("outlast_host_memory_available_bytes", "Memory that programs can still get")
OOM_KILLS = Counter("outlast_host_oom_kills_total", "Processes killed for want of memory")
DISK = Counter(
    "outlast_host_disk_bytes_total", "Bytes read from and written to disks", ("device", "direction")
)
DISK_BUSY = Counter(
    "outlast_host_disk_busy_seconds_total", "Time with requests under way", ("device",)
)
FREE = Gauge(
    "outlast_host_filesystem_free_bytes", "Free space where the agent keeps files", ("folder",)
)
SIZE = Gauge("outlast_host_filesystem_size_bytes", "Size of that file system", ("folder",))
FAMILIES: tuple[Family, ...] = (CPU, MEMORY, AVAILABLE, OOM_KILLS, DISK, DISK_BUSY, FREE, SIZE)

_CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
# Of /proc/diskstats, whatever the disk's own sectors are.
_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where the agent keeps files."""

    state_dir: Path
    memory_dir: Path
    data_dir: Path

    @classmethod
    def of(cls, config: AgentConfig) -> Folders:
        """Those of an agent with these options."""
        return cls(
            state_dir=config.state_dir, memory_dir=config.memory_dir, data_dir=config.data_dir
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One line of /proc/diskstats."""

    device: str
    read_bytes: int
    written_bytes: int
    busy_s: float


def collect(root: Path, folders: Folders) -> Iterator[Metric]:
    """The families of this subject; `root` is where /proc and /sys are."""
    proc = root / "proc"
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    yield CPU.of(((mode,), ticks / ticks_per_s) for mode, ticks in cpu_ticks(_read(proc / "stat")))
    memory = number_table(_read(proc / "meminfo"))
    yield MEMORY.of(((), memory[key] * 1024) for key in ("MemTotal",) if key in memory)
    yield AVAILABLE.of(((), memory[key] * 1024) for key in ("MemAvailable",) if key in memory)
    events = number_table(_read(proc / "vmstat"))
    yield OOM_KILLS.of(((), events[key]) for key in ("oom_kill",) if key in events)
    whole = {path.name for path in _entries(root / "sys" / "block")}
    disks = [disk for disk in disk_lines(_read(proc / "diskstats")) if disk.device in whole]
    yield DISK.of(
        ((disk.device, direction), value)
        for disk in disks
        for direction, value in (("read", disk.read_bytes), ("written", disk.written_bytes))
    )
    yield DISK_BUSY.of(((disk.device,), disk.busy_s) for disk in disks)
    usages = [(name, shutil.disk_usage(path)) for name, path in _folders(folders)]
    yield FREE.of(((name,), usage.free) for name, usage in usages)
    yield SIZE.of(((name,), usage.total) for name, usage in usages)


def cpu_ticks(stat: str) -> list[tuple[str, int]]:
    """Clock ticks of all CPUs together, by mode, from the text of /proc/stat."""
    for line in stat.splitlines():
        name, *values = line.split()
        if name == "cpu":
            return list(zip(_CPU_MODES, map(int, values), strict=False))
    return []


def number_table(text: str) -> dict[str, int]:
    """Lines of a name and a number, as in /proc/meminfo and /proc/vmstat."""
    found = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def disk_lines(diskstats: str) -> list[Disk]:
    """Disks that were ever used, partitions included, from the text of /proc/diskstats."""
    disks = []
    for line in diskstats.splitlines():
        _, _, device, *values = line.split()
        read, written, busy_ms = int(values[2]), int(values[6]), int(values[9])
        if read or written:
            disks.append(
                Disk(
                    device=device,
                    read_bytes=read * _SECTOR_BYTES,
                    written_bytes=written * _SECTOR_BYTES,
                    busy_s=busy_ms / 1e3,
                )
            )
    return disks


def _folders(folders: Folders) -> Iterator[tuple[str, Path]]:
    named = (
        ("state", folders.state_dir),
        ("memory", folders.memory_dir),
        ("data", folders.data_dir),
    )
    return ((name, path) for name, path in named if path.is_dir())


def _entries(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def _read(path: Path) -> str:
    """A file of /proc; empty where this kernel has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
