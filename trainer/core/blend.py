"""Which source a sample of a blend comes from: a function of its position alone.

The weights become whole numbers of samples of each source in one period, and the order within
the period is Tijdeman's ("The chairman assignment problem", 1980): at every position the share
that a source has had so far is less than one sample off its weight. A period is at most 65,536
samples, so the position of a sample of 10^9 is found at the cost of a division.

What does not belong here: which sample of its source it is (`trainer.core.batch`).
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

_MAX_PERIOD = 2**16


class Pattern:
    """One period of a blend with fixed weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights need not sum to one; some must be more than zero."""
        self.counts = _counts(weights)
        """Samples of each source in a period."""
        self._sources = array("H", _order(self.counts))
        taken = [0] * len(self.counts)
        self._earlier = array("I")
        for source in self._sources:
            self._earlier.append(taken[source])
            taken[source] += 1

    @property
    def period(self) -> int:
        return len(self._sources)

    def at(self, position: int) -> tuple[int, int]:
        """Source of the sample at `position`, and how many samples of it come before."""
        number, inside = divmod(position, self.period)
        source = self._sources[inside]
        return source, number * self.counts[source] + self._earlier[inside]

    def before(self, position: int) -> list[int]:
        """Samples of each source in front of `position`."""
        number, inside = divmod(position, self.period)
        begun = self._sources[:inside]
        return [number * count + begun.count(source) for source, count in enumerate(self.counts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Weights that hold from a position on."""

    first_position: int
    weights: tuple[float, ...]


class Blend:
    """Weights that change at given positions; no sample of a source is left out or repeated."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """The first stage begins at position 0, and the others after it in order."""
        self._firsts = [stage.first_position for stage in stages]
        self._patterns = [Pattern(stage.weights) for stage in stages]
        self._taken = [[0] * len(stages[0].weights)]
        for number, end in enumerate(self._firsts[1:]):
            so_far = self._patterns[number].before(end - self._firsts[number])
            self._taken.append([a + b for a, b in zip(self._taken[-1], so_far, strict=True)])

    def at(self, position: int) -> tuple[int, int]:
        """Source of the sample at `position`, and how many samples of it come before."""
        stage = bisect_right(self._firsts, position) - 1
        source, earlier = self._patterns[stage].at(position - self._firsts[stage])
        return source, self._taken[stage][source] + earlier

    def before(self, position: int) -> list[int]:
        """Samples of each source in front of `position`."""
        stage = bisect_right(self._firsts, position) - 1
        here = self._patterns[stage].before(position - self._firsts[stage])
        return [a + b for a, b in zip(self._taken[stage], here, strict=True)]


def blend_of(
    weights: Mapping[str, float],
    changes: Sequence[tuple[int, Mapping[str, float]]],
    *,
    global_batch: int,
) -> Blend:
    """The blend of sources with names; changes have their first step and its weights."""
    later = [
        Stage(
            first_position=(step - 1) * global_batch,
            weights=tuple(changed.get(name, 0.0) for name in weights),
        )
        for step, changed in changes
    ]
    return Blend([Stage(first_position=0, weights=tuple(weights.values())), *later])


def _counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers of a period, exact where a short period allows it."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if total <= 0 or min(exact) < 0:
        raise ValueError(f"weights {list(weights)}: none may be negative, nor all zero")
    shares = [each / total for each in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    # None vanishes; what rounding leaves goes to those that lost most of a sample.
    counts = [math.floor(share * _MAX_PERIOD) or int(share > 0) for share in shares]
    left = _MAX_PERIOD - sum(counts)
    by_loss = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i] * _MAX_PERIOD, i))
    for source in by_loss[: max(0, left)]:
        counts[source] += 1
    largest = counts.index(max(counts))
    counts[largest] += min(0, left)
    return tuple(counts)


def _order(counts: Sequence[int]) -> list[int]:
    """The source of each position of a period.

    A source may have its next sample once it is due by a little, and the one of which the next
    is needed soonest goes first. All times are whole: they are compared with positions.
    """
    period = sum(counts)
    sources = [source for source, count in enumerate(counts) if count]
    if len(sources) == 1:
        return sources * period
    parts = 2 * len(sources) - 2

    def due(source: int, taken: int) -> int:
        return -(-(taken * parts + 1) * period // (counts[source] * parts))

    def needed(source: int, taken: int) -> int:
        return ((taken + 1) * parts - 1) * period // (counts[source] * parts)

    waiting = [(due(source, 0), source, 0) for source in sources]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    order = []
    for position in range(1, period + 1):
        while waiting and waiting[0][0] <= position:
            _, source, taken = heapq.heappop(waiting)
            heapq.heappush(ready, (needed(source, taken), source, taken))
        _, source, taken = heapq.heappop(ready)
        order.append(source)
        heapq.heappush(waiting, (due(source, taken + 1), source, taken + 1))
    return order
