"""When and whom the demo hits: drawn from a seed, before anything is known of the run.

The draws are shares between 0 and 1; they meet real steps, ranks and nodes only
at the moment of the fault. So a seed names the same faults on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from demo.analysis import FaultKind

Item = TypeVar("Item")

# Shares of the run in which each fault falls. They leave room for the first steps
# of an attempt, for one fault to be over before the next, and for an end.
WORKER_WINDOW = (0.15, 0.40)
NODE_WINDOW = (0.55, 0.80)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault to come: after which step, how far into the next, and whom."""

    kind: FaultKind
    after_step: int
    delay_share: float
    victim_draw: float

    def choose(self, candidates: Sequence[Item]) -> Item:
        """The candidate that the draw falls on."""
        return candidates[min(int(self.victim_draw * len(candidates)), len(candidates) - 1)]


def plan_faults(seed: int, steps: int) -> tuple[PlannedFault, PlannedFault]:
    """One worker killed in the first half of a run, one node lost in the second."""
    random = Random(seed)
    return (
        _draw(random, FaultKind.WORKER_KILLED, WORKER_WINDOW, steps),
        _draw(random, FaultKind.NODE_LOST, NODE_WINDOW, steps),
    )


def _draw(random: Random, kind: FaultKind, window: tuple[float, float], steps: int) -> PlannedFault:
    share = random.uniform(*window)
    return PlannedFault(
        kind=kind,
        after_step=min(max(1, round(share * steps)), max(1, steps - 1)),
        delay_share=random.random(),
        victim_draw=random.random(),
    )
