"""Whether a value rises or falls over days, and by how much a week.

The slope is the median of the slopes of all pairs of points (Theil 1950, Sen 1968): up to 29 % of
the points may be anything at all. Whether it is more than chance is the test of Mann (1945) and
Kendall (1975), whose variance is made wider for points that follow their neighbours, as for a
first-order autoregression (Yue and Wang 2004). Only points of the same block are held against each
other, and blocks are added up (Hirsch, Slack and Smith 1982): so what changes between two layouts,
or between two attempts, is no trend.

MegaScale saw MFU decline over weeks in which forward, backward and optimizer took as long as ever
(NSDI '24, 6.3).

What does not belong here: what the values are (`history`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from statistics import median

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
# A day has its own rhythm (other jobs, people, temperature), and must have been seen once.
LEAST_SPAN_S = DAY_S - 3600.0
LEAST_POINTS = 20
# A job is looked at a hundred times a week, and each look is a chance to be wrong.
SIGNIFICANT = 1e-3
# Of the normal distribution, for an interval of 95 %.
_Z95 = 1.959964
# What follows its neighbours more closely than that cannot be told from a trend by its length.
_MOST_CORRELATION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value of some moment."""

    at_s: float
    value: float
    # Points of different blocks are not compared.
    block: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a value changes."""

    # By so much a week, with the bounds of the 95 % interval, in the value's own unit.
    per_week: float
    low: float
    high: float
    # The chance that values without a trend look like it.
    p_value: float
    # The median of the values.
    level: float
    num_points: int
    span_s: float

    @property
    def is_significant(self) -> bool:
        """Whether it is more than chance."""
        return self.p_value < SIGNIFICANT

    @property
    def ratio_per_week(self) -> float:
        """The change a week as a share of the level."""
        return self.per_week / self.level if self.level else 0.0

    @property
    def lost_ratio(self) -> float:
        """What a decline has cost since the first point, as a share of what there would have been
        without it."""
        fallen = -self.per_week * self.span_s / WEEK_S
        first = self.level + fallen / 2
        return fallen / 2 / first if fallen > 0 and first > 0 else 0.0


def trend(points: Iterable[Point]) -> Trend | None:
    """The trend of some points in any order; None when they are too few, or of less than a day."""
    blocks = _blocks(points)
    known = [point for block in blocks for point in block]
    if len(known) < LEAST_POINTS:
        return None
    span_s = max(p.at_s for p in known) - min(p.at_s for p in known)
    if span_s < LEAST_SPAN_S:
        return None
    slopes, score = _slopes(blocks)
    if not slopes:
        return None
    slope = median(slopes)
    spread = math.sqrt(_variance(blocks) * _widening(blocks, slope))
    z = max(0.0, abs(score) - 1) / spread if spread > 0 else 0.0
    slopes.sort()
    reach = _Z95 * spread
    low = slopes[max(0, int((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))]
    return Trend(
        per_week=slope * WEEK_S,
        low=low * WEEK_S,
        high=high * WEEK_S,
        p_value=math.erfc(z / math.sqrt(2)),
        level=median(point.value for point in known),
        num_points=len(known),
        span_s=span_s,
    )


def _blocks(points: Iterable[Point]) -> list[list[Point]]:
    found: dict[Hashable, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.at_s):
        found.setdefault(point.block, []).append(point)
    return list(found.values())


def _slopes(blocks: Sequence[Sequence[Point]]) -> tuple[list[float], int]:
    """Of all pairs, and by how many more of them rise than fall."""
    slopes: list[float] = []
    score = 0
    for block in blocks:
        for one, other in combinations(block, 2):
            rise = other.value - one.value
            score += (rise > 0) - (rise < 0)
            if other.at_s > one.at_s:
                slopes.append(rise / (other.at_s - one.at_s))
    return slopes, score


def _variance(blocks: Sequence[Sequence[Point]]) -> float:
    """Of the score without a trend; ties make it smaller."""

    def of(count: int) -> int:
        return count * (count - 1) * (2 * count + 5)

    total = 0
    for block in blocks:
        values = sorted(point.value for point in block)
        total += of(len(block)) - sum(of(len([*same])) for _, same in groupby(values))
    return total / 18


def _widening(blocks: Sequence[Sequence[Point]], slope: float) -> float:
    """By how much the variance is larger because points follow their neighbours."""
    squares = products = 0.0
    num_products = num_squares = 0
    for block in blocks:
        rests = [point.value - slope * (point.at_s - block[0].at_s) for point in block]
        middle = median(rests)
        rests = [rest - middle for rest in rests]
        squares += sum(rest * rest for rest in rests)
        products += sum(one * other for one, other in pairwise(rests))
        num_squares += len(rests)
        num_products += len(rests) - 1
    if squares <= 0 or num_products <= 0:
        return 1.0
    correlation = (products / num_products) / (squares / num_squares)
    kept = min(_MOST_CORRELATION, max(0.0, correlation))
    return (1 + kept) / (1 - kept)
