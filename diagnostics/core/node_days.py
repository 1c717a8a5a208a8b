"""What a node was like among the nodes of its jobs, over days.

In every window one node of a job has the rank that works longest. A node that is as the others is
that one as often as each of them; how much more often another one must be before it is more than
chance is the binomial tail, as near as the normal distribution comes to it, with every node of
the fleet a chance to be wrong (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diagnostics.core.launches import NodeWork

SIGNIFICANT = 1e-3
# Fewer prove nothing, however they fall.
LEAST_WINDOWS = 20
# Some node is always the slowest, and where it is by less than that nobody gains from another.
LEAST_RATIO = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDay:
    """Sums over the windows of one or more days."""

    num_windows: int = 0
    num_slowest: int = 0
    # What `num_slowest` would be of a node that is as the others.
    expected_slowest: float = 0.0
    # Of `NodeWork.ratio` and `NodeWork.last_ratio`.
    ratios: float = 0.0
    lasts: float = 0.0
    # In use for a job.
    service_s: float = 0.0

    @property
    def slowest_ratio(self) -> float:
        """In which share of the windows its ranks were the slowest."""
        return self.num_slowest / self.num_windows if self.num_windows else 0.0

    @property
    def expected_ratio(self) -> float:
        """The same of a node that is as the others."""
        return self.expected_slowest / self.num_windows if self.num_windows else 0.0

    @property
    def work_ratio(self) -> float:
        """Its slowest rank's own work as a multiple of its peers', in the mean; 0 for unknown."""
        return self.ratios / self.num_windows if self.num_windows else 0.0

    @property
    def last_ratio(self) -> float:
        """In which share of common operations one of its ranks was the last to enter."""
        return self.lasts / self.num_windows if self.num_windows else 0.0

    def is_slow(self, num_nodes: int) -> bool:
        """Whether it is slower than its peers, by enough and more often than chance, among so many
        nodes."""
        expected = self.expected_ratio
        if self.num_windows < LEAST_WINDOWS or not 0 < expected < 1:
            return False
        if self.work_ratio < LEAST_RATIO:
            return False
        spread = math.sqrt(self.num_windows * expected * (1 - expected))
        # Half a window, for counts are whole.
        z = (self.num_slowest - self.expected_slowest - 0.5) / spread
        return math.erfc(z / math.sqrt(2)) / 2 * max(1, num_nodes) < SIGNIFICANT


def of_window(work: NodeWork | None, service_s: float) -> NodeDay:
    """One window of a node; `work` is None where its ranks were not compared."""
    if work is None:
        return NodeDay(service_s=service_s)
    return NodeDay(
        num_windows=1,
        num_slowest=int(work.is_slowest),
        expected_slowest=work.expected_ratio,
        ratios=work.ratio,
        lasts=work.last_ratio,
        service_s=service_s,
    )
