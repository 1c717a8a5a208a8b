"""What a node's memory and disks say, and the kernel's log.

Limits are hysteretic: what is found at one level is over only at a better one, so that a
value at the limit is one finding and not a hundred.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

# Version of `KERNEL_RULES`; raised with every change, so that an incident says by which it is.
RULES_VERSION = 2

LEAST_MEMORY = 0.05
ENOUGH_MEMORY = 0.10
LEAST_DISK = 0.05
ENOUGH_DISK = 0.08


class Subject(StrEnum):
    """What a finding is about."""

    MEMORY = "host_memory"
    DISK = "disk"
    KERNEL = "kernel_log"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """A node as its agent sees it."""

    # Share of the memory that programs can still get; of the container's where it has less.
    memory_available: float
    # Processes killed for want of memory since the machine began.
    oom_kills: int
    # Share that is free, by folder.
    disks_free: Mapping[str, float]
    # Lines of the kernel's log since the last look that a rule knows.
    kernel: tuple[KernelLine, ...] = ()


class KernelClass(StrEnum):
    """What a line of the kernel is about."""

    PROGRAM = "program"
    FOLLOW_UP = "follow-up"
    DEVICE_MEMORY = "device memory"
    NVLINK = "nvlink"
    DEVICE = "device"
    MEMORY_OR_PROCESSOR = "memory or processor"
    HOST_MEMORY = "host memory"
    DISK = "disk"
    LINK = "link"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """One kind of line in a kernel's log, and lines that it must and must not match."""

    name: str
    pattern: re.Pattern[str]
    kernel_class: KernelClass
    means: str
    # Whether the node itself is at fault, so that `act` checks it.
    blames_node: bool = True
    matches: tuple[str, ...]
    misses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """A line that a rule knows."""

    rule: KernelRule
    words: str


def _xid(*numbers: int) -> re.Pattern[str]:
    """Lines of the driver with one of these numbers, which NVIDIA's XID catalogue explains."""
    listed = "|".join(map(str, numbers))
    return re.compile(rf"NVRM: Xid \((?:PCI:)?[0-9a-fA-F:.]+\).*?: (?:{listed}),")


KERNEL_RULES: tuple[KernelRule, ...] = (
    KernelRule(
        name="xid of a program",
        pattern=_xid(8, 13, 31, 32, 39, 68, 69, 80),
        kernel_class=KernelClass.PROGRAM,
        means="a program made an error on a GPU; where others do not, the GPU may be at fault",
        blames_node=False,
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, MMU Fault",
            "NVRM: Xid (PCI:0000:86:00): 13, pid=77, Graphics SM Warp Exception",
        ),
        misses=("NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', Double Bit ECC Error",),
    ),
    KernelRule(
        name="xid that follows",
        pattern=_xid(37, 38, 43, 44, 45, 66, 92, 121, 137),
        kernel_class=KernelClass.FOLLOW_UP,
        means="the driver cleans up after another error, or tells of one that was corrected",
        blames_node=False,
        matches=("NVRM: Xid (PCI:0000:3b:00): 45, pid=1234, Ch 00000008",),
        misses=("NVRM: Xid (PCI:0000:3b:00): 145, pid=1234, RLW_SRC_TRACK Fatal",),
    ),
    KernelRule(
        name="xid of memory",
        pattern=_xid(48, 63, 64, 94, 95, 140, 156, 171, 172),
        kernel_class=KernelClass.DEVICE_MEMORY,
        means="a GPU's memory reports an error that could not be corrected",
        matches=("NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', Double Bit ECC Error",),
        misses=("NVRM: Xid (PCI:0000:86:00): 13, pid=77, Graphics SM Warp Exception",),
    ),
    KernelRule(
        name="xid of nvlink",
        pattern=_xid(74, *range(144, 151)),
        kernel_class=KernelClass.NVLINK,
        means="an NVLink port of a GPU reports an error",
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 74, pid=1, NVLink: fatal error detected on link 6",
            "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 04 (0x00000001)",
        ),
        misses=("NVRM: Xid (PCI:0000:3b:00): 45, pid=1234, Ch 00000008",),
    ),
    KernelRule(
        name="xid",
        pattern=re.compile(r"NVRM: Xid \(|GPU has fallen off the bus"),
        kernel_class=KernelClass.DEVICE,
        means="the driver reports an error of a GPU",
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:3b:00): 119, pid=1234, Timeout waiting for RPC from GSP0!",
        ),
        misses=("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",),
    ),
    KernelRule(
        name="machine check",
        pattern=re.compile(
            r"\[Hardware Error\]: (?!.*corrected)|EDAC \S+: \d+ UE |mce: .*Uncorrected|"
            r"Memory failure: 0x"
        ),
        kernel_class=KernelClass.MEMORY_OR_PROCESSOR,
        means="memory or processor report an error that could not be corrected",
        matches=(
            "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0",
            "mce: [Hardware Error]: Machine check events logged: Uncorrected error",
            "Memory failure: 0x7f3a2: recovery action for dirty LRU page: Recovered",
        ),
        misses=(
            "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0",
            "EDAC MC: Ver: 3.0.0",
        ),
    ),
    KernelRule(
        name="out of memory",
        pattern=re.compile(r"[Oo]ut of memory: Killed process|oom-kill:"),
        kernel_class=KernelClass.HOST_MEMORY,
        means="the kernel killed a process for want of memory",
        blames_node=False,
        matches=(
            "Out of memory: Killed process 4242 (python) total-vm:81788928kB",
            "Memory cgroup out of memory: Killed process 87 (python3)",
        ),
        misses=("python invoked by a user out of boredom",),
    ),
    KernelRule(
        name="disk",
        pattern=re.compile(
            r"I/O error, dev |Buffer I/O error on dev|EXT4-fs error|XFS \(.*\): .*[Cc]orruption|"
            r"Remounting filesystem read-only|nvme.*: (?:I/O \d+ .*timeout|controller is down)"
        ),
        kernel_class=KernelClass.DISK,
        means="a disk or its file system reports errors",
        matches=(
            "blk_update_request: I/O error, dev sda, sector 1953525168",
            "EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2",
            "nvme nvme0: controller is down; will reset: CSTS=0xffffffff",
        ),
        misses=("EXT4-fs (sda1): mounted filesystem with ordered data mode",),
    ),
    KernelRule(
        name="link",
        pattern=re.compile(
            r"mlx5_core .*(?:Link down|health compromised|[Ff]atal)|NETDEV WATCHDOG: .*timed out|"
            r"NVLink: .*(?:[Ff]atal|error)"
        ),
        kernel_class=KernelClass.LINK,
        means="a network or NVLink port has failed",
        matches=(
            "mlx5_core 0000:3b:00.0 ens1f0np0: Link down",
            "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out",
        ),
        misses=("mlx5_core 0000:3b:00.0 ens1f0np0: Link up",),
    ),
    KernelRule(
        name="lockup",
        pattern=re.compile(r"soft lockup|hard LOCKUP|blocked for more than \d+ seconds"),
        kernel_class=KernelClass.KERNEL,
        means="a task or a processor hangs in the kernel",
        matches=(
            "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]",
            "INFO: task python:4242 blocked for more than 120 seconds.",
        ),
        misses=("watchdog: Enabled. Permanently consumes one hw-PMU counter.",),
    ),
)


def known_lines(lines: Iterable[str]) -> tuple[KernelLine, ...]:
    """Lines of a kernel's log that some rule knows, each with what it means."""
    found = []
    for line in lines:
        rule = next((rule for rule in KERNEL_RULES if rule.pattern.search(line)), None)
        if rule is not None:
            which = f"class {str(rule.kernel_class)!r}, rule {rule.name!r} of table {RULES_VERSION}"
            words = f"{rule.means} (kernel log, {which}): {line.strip()[:300]}"
            found.append(KernelLine(rule=rule, words=words))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something found on a node, or over again when `words` is empty."""

    subject: Subject
    # What of the subject: a folder, "" where there is only one.
    what: str
    words: str
    # It speaks of what runs on the node, and not against the node.
    spares_node: bool = False


class HostWatch:
    """One node, look by look."""

    def __init__(self) -> None:
        self._told: dict[tuple[Subject, str], bool] = {}
        self._oom_kills: int | None = None

    def take(self, state: HostState) -> list[Change]:
        """What is new since the last look."""
        share = state.memory_available
        changes = self._level(
            (Subject.MEMORY, ""), share, (LEAST_MEMORY, ENOUGH_MEMORY), "of its memory is left"
        )
        for folder, free in state.disks_free.items():
            where = (Subject.DISK, folder)
            words = f"of the disk of its folder {folder!r} is free"
            changes += self._level(where, free, (LEAST_DISK, ENOUGH_DISK), words)
        before, self._oom_kills = self._oom_kills, state.oom_kills
        if before is not None and state.oom_kills > before:
            words = f"the kernel killed {state.oom_kills - before} processes for want of memory"
            changes.append(Change(subject=Subject.MEMORY, what="oom", words=words))
        for line in state.kernel:
            spares = not line.rule.blames_node
            changes.append(
                Change(subject=Subject.KERNEL, what="", words=line.words, spares_node=spares)
            )
        return changes

    def _level(
        self, where: tuple[Subject, str], share: float, limits: tuple[float, float], words: str
    ) -> list[Change]:
        least, enough = limits
        subject, what = where
        if share < least and not self._told.get(where):
            self._told[where] = True
            text = f"{share:.1%} {words} (limit {least:.0%}, ours)"
            return [Change(subject=subject, what=what, words=text)]
        if share >= enough and self._told.pop(where, False):
            return [Change(subject=subject, what=what, words="")]
        return []
