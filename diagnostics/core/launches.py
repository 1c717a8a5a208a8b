"""How late ranks enter the operations that they have in common, and which node works longest.

All replicas leave an operation together. So the one that entered it last waited least, and what
it waited is what the operation itself takes; by as much as another one waited longer, it had been
there earlier. That needs no clocks to agree, and nothing that heartbeats do not say already.
MegaScale found that MFU declined because replicas entered their reduce-scatter further and further
apart while forward, backward and optimizer took as long as ever (NSDI '24, 6.3).

What does not belong here: what is said of one rank at once (`stragglers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

# A rank that was not heard of in most samples is not judged by the others.
_LEAST_SAMPLES = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """A rank's last steps, as a mean of one."""

    # Without waiting for others.
    work_s: float
    # In operations with the other replicas.
    waited_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """How far apart the replicas of a job enter their operations, in a step."""

    # Between the first and the last of a group; and how long one waits for the last in the mean.
    spread_s: float
    late_s: float
    step_s: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """A node among those of its job, in one window."""

    # Its slowest rank's own work, as a multiple of the median of its stage.
    ratio: float
    # Whether that is the largest of all nodes.
    is_slowest: bool
    # In which share of the operations seen one of its ranks entered last, and in which share a
    # node does that is as the others.
    last_ratio: float
    expected_ratio: float


class LaunchWindow:
    """Samples of the ranks of one attempt. Ranks of a stage are `equals`; `replicas` share
    operations."""

    def __init__(
        self,
        equals: Sequence[Sequence[int]],
        replicas: Sequence[Sequence[int]],
        nodes: Mapping[int, str],
    ) -> None:
        self._equals = equals
        self._replicas = [group for group in replicas if len(group) > 1]
        self._nodes = nodes
        self._work_s: dict[int, list[float]] = {}
        self._spreads_s: list[float] = []
        self._lates_s: list[float] = []
        self._steps_s: list[float] = []
        self._last = Counter[str]()
        self._num_last = 0
        self._num_samples = 0

    def add(self, sample: Mapping[int, RankSteps]) -> None:
        """What ranks said at about the same moment."""
        if not sample:
            return
        self._num_samples += 1
        for rank, steps in sample.items():
            known = self._work_s.setdefault(rank, [0.0, 0.0])
            known[0] += steps.work_s
            known[1] += 1
        self._steps_s.append(fmean(steps.step_s for steps in sample.values()))
        spreads, lates = [], []
        for group in self._replicas:
            waits = {rank: sample[rank].waited_s for rank in group if rank in sample}
            if len(waits) < len(group) or max(waits.values()) <= 0:
                # Not all were heard of, or they have exchanged nothing.
                continue
            last = min(waits, key=lambda rank: waits[rank])
            spreads.append(max(waits.values()) - waits[last])
            lates.append(fmean(waits.values()) - waits[last])
            self._last[self._nodes.get(last, "")] += 1
            self._num_last += 1
        if spreads:
            self._spreads_s.append(fmean(spreads))
            self._lates_s.append(fmean(lates))

    def launches(self) -> Launches | None:
        """Of the whole window; None where no ranks are replicas of each other."""
        if not self._spreads_s:
            return None
        return Launches(
            spread_s=median(self._spreads_s),
            late_s=median(self._lates_s),
            step_s=median(self._steps_s),
            num_samples=len(self._spreads_s),
        )

    def nodes(self) -> dict[str, NodeWork]:
        """Each node of the job whose ranks were heard of."""
        ratios: dict[str, float] = {}
        for group in self._equals:
            means = {
                rank: known[0] / known[1]
                for rank in group
                if (known := self._work_s.get(rank))
                and known[1] >= _LEAST_SAMPLES * self._num_samples
            }
            middle = median(means.values()) if means else 0.0
            if middle <= 0 or len({self._nodes.get(rank, "") for rank in means}) < 2:
                # Nothing to hold against another node.
                continue
            for rank, mean_s in means.items():
                node = self._nodes.get(rank, "")
                ratios[node] = max(ratios.get(node, 0.0), mean_s / middle)
        if not ratios:
            return {}
        slowest = max(ratios, key=lambda node: ratios[node])
        num_last = max(1, self._num_last)
        return {
            node: NodeWork(
                ratio=ratio,
                is_slowest=node == slowest,
                last_ratio=self._last[node] / num_last,
                expected_ratio=1 / len(ratios),
            )
            for node, ratio in ratios.items()
        }
