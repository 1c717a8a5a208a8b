"""What fails in large training runs, and how often: published counts, each with its source.

Counts, not percentages: a printed share may not fit its own counts (Llama 3 prints 30.1 %
for 148 of 419). What a cause looks like in the world is its `Kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a fault does to a job."""

    GPU = "gpu"  # a device is broken until its node is replaced
    SDC = "sdc"  # a device computes wrongly
    HOST = "host"  # a machine goes dark
    NETWORK = "network"  # a NIC or cable is broken until its node is replaced
    FLAP = "flap"  # a link is down for a moment
    SOFTWARE = "software"  # a process dies; the next one lives
    HANG = "hang"  # nobody dies, nobody advances


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row of a published table."""

    name: str
    count: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A run's faults: how many in so many node-days, and of what causes."""

    name: str
    # Faults in 1,000 days of one node with 8 GPUs.
    per_1000_node_days: float
    causes: tuple[Cause, ...]
    source: str

    @property
    def total(self) -> int:
        return sum(cause.count for cause in self.causes)


def _causes(*rows: tuple[str, int, Kind]) -> tuple[Cause, ...]:
    return tuple(Cause(name=name, count=count, kind=kind) for name, count, kind in rows)


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            name="llama3",
            per_1000_node_days=3.79,
            causes=_causes(
                ("faulty GPU", 148, Kind.GPU),
                ("GPU HBM3 memory", 72, Kind.GPU),
                ("software bug", 54, Kind.SOFTWARE),
                ("network switch or cable", 35, Kind.NETWORK),
                ("unplanned host maintenance", 32, Kind.HOST),
                ("GPU SRAM memory", 19, Kind.GPU),
                ("GPU system processor", 17, Kind.GPU),
                ("NIC", 7, Kind.NETWORK),
                ("NCCL watchdog timeout", 7, Kind.HANG),
                ("silent data corruption", 6, Kind.SDC),
                ("GPU thermal interface", 6, Kind.GPU),
                ("SSD", 3, Kind.HOST),
                ("power supply", 3, Kind.HOST),
                ("server chassis", 2, Kind.HOST),
                ("IO expansion board", 2, Kind.HOST),
                ("dependency", 2, Kind.SOFTWARE),
                ("CPU", 2, Kind.HOST),
                ("system memory", 2, Kind.HOST),
            ),
            source="The Llama 3 Herd of Models, table 5: 419 unexpected interruptions of "
            "16,384 GPUs in 54 days, 419 / 54 / 2,048 nodes = 3.79 in 1,000 node-days",
        ),
        Mix(
            name="byterobust",
            per_1000_node_days=2.6,
            causes=_causes(
                ("CUDA error", 19_968, Kind.SOFTWARE),
                ("CPU overload", 6_095, Kind.SOFTWARE),
                ("CPU out of memory", 5_567, Kind.SOFTWARE),
                ("hang", 5_506, Kind.HANG),
                ("disk full", 2_755, Kind.SOFTWARE),
                ("InfiniBand error", 1_599, Kind.FLAP),
                ("filesystem mount", 1_176, Kind.SOFTWARE),
                ("HDFS error", 1_104, Kind.SOFTWARE),
                ("container error", 781, Kind.SOFTWARE),
                ("MFU decline", 442, Kind.GPU),
                ("kernel panic", 203, Kind.HOST),
                ("GPU memory error", 188, Kind.GPU),
                ("NaN", 148, Kind.SDC),
                ("external service", 128, Kind.SOFTWARE),
                ("GPU unavailable", 76, Kind.GPU),
                ("disk fault", 47, Kind.HOST),
            ),
            source="ByteRobust (SOSP '25), table 1 without manual changes; the rate is that of "
            "its MoE job (table 4, 90 days assumed), the higher of its two",
        ),
        Mix(
            name="ft-hsdp",
            per_1000_node_days=2.3,
            causes=_causes(
                ("GPU HBM3 memory", 155, Kind.GPU),
                ("PCIe", 122, Kind.GPU),
                ("NCCL watchdog timeout", 61, Kind.HANG),
                ("GPU compute", 50, Kind.GPU),
                ("software", 48, Kind.SOFTWARE),
                ("maintenance", 42, Kind.HOST),
                ("kernel", 39, Kind.HOST),
                ("reboot", 38, Kind.HOST),
                ("silent data corruption", 37, Kind.SDC),
                ("network switch or cable", 36, Kind.NETWORK),
                ("SSD", 30, Kind.HOST),
                ("GPU SRAM memory", 8, Kind.GPU),
                ("unknown", 7, Kind.SOFTWARE),
                ("system memory", 2, Kind.HOST),
                ("cooling", 2, Kind.GPU),
                ("GPU thermal interface", 1, Kind.GPU),
            ),
            source="FT-HSDP: 678 interruptions of a run on 32K H100, 2.3 in 1,000 node-days",
        ),
    )
}
