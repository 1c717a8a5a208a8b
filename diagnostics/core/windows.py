"""Numbers held against each other, and judgements that must hold for a while.

A single slow step proves nothing on a shared machine, and one window of them little.
Everything that is said of a rank or a job here was true in 3 of the last 5 windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOWS = 5
ENOUGH = 3
# Makes the median absolute deviation of normally distributed values their standard deviation.
_NORMAL = 1.4826
# Peers that agree to the last digit would make any difference infinitely significant.
_LEAST_SPREAD = 0.01


def robust_z(value: float, others: Sequence[float]) -> float:
    """How many standard deviations `value` lies above the median of `others`.

    The deviation is estimated from the median absolute one, which one bad value in
    `others` does not move, and is at least 1% of the median.
    """
    middle = median(others)
    return z_of(value, middle, median(abs(other - middle) for other in others))


def z_of(value: float, middle: float, deviation: float) -> float:
    """The same, of the others' median and their median absolute deviation from it."""
    return (value - middle) / max(_NORMAL * deviation, _LEAST_SPREAD * abs(middle), 1e-12)


class Lasting:
    """Whether something was bad in enough of the last windows."""

    def __init__(self) -> None:
        self._bad: deque[bool] = deque(maxlen=WINDOWS)
        self.is_reported = False

    def take(self, *, bad: bool) -> bool | None:
        """One more window. True when it is bad for good now, False when that is over, else None.

        It is over after as many good windows as all that are remembered.
        """
        self._bad.append(bad)
        if not self.is_reported and sum(self._bad) >= ENOUGH:
            self.is_reported = True
            return True
        if self.is_reported and len(self._bad) == WINDOWS and not any(self._bad):
            self.is_reported = False
            return False
        return None
