"""What the user of the benchmark chose, and the arithmetic that all its parts share."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bench.trainer.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`small` tries the program at sizes that take seconds; its figures mean nothing."""

    rounds: int
    small: bool

    def sized(self, shape: Shape) -> Shape:
        """`shape`, or its small likeness."""
        return shape.smaller() if self.small else shape


def ratio_to_best(row: dict[str, Any]) -> float:
    """Speed of ours over the faster form of the baseline: median of the paired rounds' ratios."""
    baselines = [name for name in row["step_s"] if name != "ours"]
    best = min(baselines, key=lambda name: row["median_s"][name])
    pairs = zip(row["step_s"][best], row["step_s"]["ours"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)
