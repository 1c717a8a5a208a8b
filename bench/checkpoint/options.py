"""What the user of the benchmark chose, and the arithmetic that all its parts share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.checkpoint.gpt import SMALL, Size
from bench.results import Claim

Measured = tuple[list[dict[str, Any]], list[Claim]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`small` tries the program at sizes that take seconds; its figures mean nothing."""

    rounds: int
    small: bool
    sizes: tuple[Size, ...]

    def sized(self, size: Size) -> Size:
        """`size`, or its small likeness."""
        return SMALL if self.small else size

    def rounds_of(self, size: Size) -> int:
        """Large states are measured less often: the whole takes minutes as it is."""
        return max(1, self.rounds * 3 // 5) if size.is_large else self.rounds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of what was measured in the same round."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def quartiles(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """How far such ratios differ from each other: the lower quartile, the median, the upper."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
