"""The suites: which checks run, how hard they work and how long they may take.

A suite is data. `preflight` runs before a node is used and between a fault and
its restart when little is suspected; every second of it is downtime, so its
sizes are the smallest whose values are steady. `on-failure` runs where a node
is suspected, and may take longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard the checks of a suite work. Sizes are part of the baseline keys."""

    matmul_size: int
    matmul_size_cuda: int
    copy_bytes: int
    copy_bytes_cuda: int
    # Time given to each throughput measurement.
    measure_s: float
    # How often the seeded matmul is repeated from its seed and compared.
    exact_rounds: int
    # All devices of the node compute at full load for so long, each product compared; 0 for none.
    burn_s: float
    collective_bytes: int
    max_collective_rounds: int
    storage_bytes: int
    loopback_bytes: int
    # Of an exchange between two nodes.
    pair_bytes: int
    max_pair_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a suite. It is killed when its deadline has passed."""

    name: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Checks in the order in which they run: what is cheap and telling first."""

    name: str
    checks: tuple[Check, ...]
    effort: Effort
    # For one exchange between two nodes.
    pair_deadline_s: float

    @property
    def deadline_s(self) -> float:
        """For all checks on one node."""
        return sum(check.deadline_s for check in self.checks)


# A 512 x 512 matmul is large enough (1024 was no faster here). Small
# messages on gloo vary by 1.7 x their mean between rounds, and from about 16 MiB
# they repeat within a factor of two; preflight takes 8, because page faults alone
# make 16 cost 0.3 s more, and repeats a slow value before it believes it.
PREFLIGHT = Suite(
    name="preflight",
    checks=(
        Check(name="inventory", deadline_s=5.0),
        Check(name="gpu", deadline_s=15.0),
        Check(name="device", deadline_s=15.0),
        Check(name="loopback", deadline_s=10.0),
        Check(name="collectives", deadline_s=20.0),
        Check(name="storage", deadline_s=15.0),
    ),
    effort=Effort(
        matmul_size=512,
        matmul_size_cuda=4096,
        copy_bytes=16 * MEBIBYTE,
        copy_bytes_cuda=256 * MEBIBYTE,
        measure_s=0.1,
        exact_rounds=2,
        burn_s=0.0,
        collective_bytes=8 * MEBIBYTE,
        max_collective_rounds=4,
        storage_bytes=1 * MEBIBYTE,
        loopback_bytes=16 * MEBIBYTE,
        pair_bytes=4 * MEBIBYTE,
        max_pair_rounds=8,
    ),
    pair_deadline_s=20.0,
)

ON_FAILURE = Suite(
    name="on-failure",
    checks=(
        Check(name="inventory", deadline_s=5.0),
        Check(name="gpu", deadline_s=30.0),
        Check(name="device", deadline_s=30.0),
        Check(name="loopback", deadline_s=20.0),
        Check(name="rdma", deadline_s=60.0),
        Check(name="collectives", deadline_s=60.0),
        Check(name="storage", deadline_s=60.0),
    ),
    effort=Effort(
        matmul_size=1024,
        matmul_size_cuda=8192,
        copy_bytes=32 * MEBIBYTE,
        copy_bytes_cuda=1024 * MEBIBYTE,
        measure_s=0.5,
        exact_rounds=8,
        # Seconds in which nobody trains; long enough for clocks and currents to settle.
        burn_s=4.0,
        collective_bytes=16 * MEBIBYTE,
        max_collective_rounds=12,
        storage_bytes=8 * MEBIBYTE,
        loopback_bytes=64 * MEBIBYTE,
        pair_bytes=16 * MEBIBYTE,
        max_pair_rounds=12,
    ),
    pair_deadline_s=45.0,
)

SUITES: Mapping[str, Suite] = MappingProxyType(
    {suite.name: suite for suite in (PREFLIGHT, ON_FAILURE)}
)
