"""The table of lines in the kernel's log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.core.rules import xids
from diagnostics.core.rules.table import Rule, Table


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
class KernelMeaning:
    """What a line means."""

    kernel_class: KernelClass
    says: str
    # Whether the node itself is at fault, so that `act` checks it.
    blames_node: bool = True


KernelRule = Rule[KernelMeaning]

_RULES: tuple[KernelRule, ...] = (
    Rule(
        name="xid of a program",
        pattern=xids.line_of(xids.OF_PROGRAMS),
        means=KernelMeaning(
            kernel_class=KernelClass.PROGRAM,
            says="a program made an error on a GPU; where others do not, the GPU may be at fault",
            blames_node=False,
        ),
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, MMU Fault",
            "NVRM: Xid (PCI:0000:86:00): 13, pid=77, Graphics SM Warp Exception",
        ),
        misses=("NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', Double Bit ECC Error",),
    ),
    Rule(
        name="xid that follows",
        pattern=xids.line_of(xids.FOLLOWING),
        means=KernelMeaning(
            kernel_class=KernelClass.FOLLOW_UP,
            says="the driver cleans up after another error, or tells of one that was corrected",
            blames_node=False,
        ),
        matches=("NVRM: Xid (PCI:0000:3b:00): 45, pid=1234, Ch 00000008",),
        misses=("NVRM: Xid (PCI:0000:3b:00): 145, pid=1234, RLW_SRC_TRACK Fatal",),
    ),
    Rule(
        name="xid of memory",
        pattern=xids.line_of(xids.OF_MEMORY),
        means=KernelMeaning(
            kernel_class=KernelClass.DEVICE_MEMORY,
            says="a GPU's memory reports an error that could not be corrected",
        ),
        matches=("NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', Double Bit ECC Error",),
        misses=("NVRM: Xid (PCI:0000:86:00): 13, pid=77, Graphics SM Warp Exception",),
    ),
    Rule(
        name="xid of nvlink",
        pattern=xids.line_of(xids.OF_NVLINK),
        means=KernelMeaning(
            kernel_class=KernelClass.NVLINK,
            says="an NVLink port of a GPU reports an error",
        ),
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 74, pid=1, NVLink: fatal error detected on link 6",
            "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 04 (0x00000001)",
        ),
        misses=("NVRM: Xid (PCI:0000:3b:00): 45, pid=1234, Ch 00000008",),
    ),
    Rule(
        name="xid",
        pattern=re.compile(r"NVRM: Xid \(|GPU has fallen off the bus"),
        means=KernelMeaning(
            kernel_class=KernelClass.DEVICE,
            says="the driver reports an error of a GPU",
        ),
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:3b:00): 119, pid=1234, Timeout waiting for RPC from GSP0!",
        ),
        misses=("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",),
    ),
    Rule(
        name="machine check",
        pattern=re.compile(
            r"\[Hardware Error\]: (?!.*corrected)|EDAC \S+: \d+ UE |mce: .*Uncorrected|"
            r"Memory failure: 0x"
        ),
        means=KernelMeaning(
            kernel_class=KernelClass.MEMORY_OR_PROCESSOR,
            says="memory or processor report an error that could not be corrected",
        ),
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
    Rule(
        name="out of memory",
        pattern=re.compile(r"[Oo]ut of memory: Killed process|oom-kill:"),
        means=KernelMeaning(
            kernel_class=KernelClass.HOST_MEMORY,
            says="the kernel killed a process for want of memory",
            blames_node=False,
        ),
        matches=(
            "Out of memory: Killed process 4242 (python) total-vm:81788928kB",
            "Memory cgroup out of memory: Killed process 87 (python3)",
        ),
        misses=("python invoked by a user out of boredom",),
    ),
    Rule(
        name="disk",
        pattern=re.compile(
            r"I/O error, dev |Buffer I/O error on dev|EXT4-fs error|XFS \(.*\): .*[Cc]orruption|"
            r"Remounting filesystem read-only|nvme.*: (?:I/O \d+ .*timeout|controller is down)"
        ),
        means=KernelMeaning(
            kernel_class=KernelClass.DISK,
            says="a disk or its file system reports errors",
        ),
        matches=(
            "blk_update_request: I/O error, dev sda, sector 1953525168",
            "EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2",
            "nvme nvme0: controller is down; will reset: CSTS=0xffffffff",
        ),
        misses=("EXT4-fs (sda1): mounted filesystem with ordered data mode",),
    ),
    Rule(
        name="link",
        pattern=re.compile(
            r"mlx5_core .*(?:Link down|health compromised|[Ff]atal)|NETDEV WATCHDOG: .*timed out|"
            r"NVLink: .*(?:[Ff]atal|error)"
        ),
        means=KernelMeaning(
            kernel_class=KernelClass.LINK,
            says="a network or NVLink port has failed",
        ),
        matches=(
            "mlx5_core 0000:3b:00.0 ens1f0np0: Link down",
            "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out",
        ),
        misses=("mlx5_core 0000:3b:00.0 ens1f0np0: Link up",),
    ),
    Rule(
        name="lockup",
        pattern=re.compile(r"soft lockup|hard LOCKUP|blocked for more than \d+ seconds"),
        means=KernelMeaning(
            kernel_class=KernelClass.KERNEL,
            says="a task or a processor hangs in the kernel",
        ),
        matches=(
            "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]",
            "INFO: task python:4242 blocked for more than 120 seconds.",
        ),
        misses=("watchdog: Enabled. Permanently consumes one hw-PMU counter.",),
    ),
)

KERNEL_LOG = Table(name="kernel log", version=2, rules=_RULES)
