"""How often counters are read, by what reading them takes of a core. Pure.

What a window takes of the processor is so much for each sample, and so much for itself. Both are
known only roughly: a window on a busy machine may take twice what the next one does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# So many windows together say what one takes: one alone is no more than a hint.
_WINDOWS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """How often counters are read, and what that may cost."""

    least_s: float = 0.001
    usual_s: float = 0.0095
    """Ten milliseconds, with what it takes to wake up and read."""
    most_s: float = 0.05
    """Where it would cost too much, of many links."""
    most_cost: float = 0.0095
    """Of a core; in a few windows it may be a little more before the next ones are cheaper."""
    cheap_cost: float = 0.007
    """What more often than usual may cost."""


@dataclass(slots=True)
class SamplingPace:
    """How often to sample next."""

    limits: SamplingLimits = SamplingLimits()
    # CPU seconds of one sample; and of all else, as a share of a core.
    _sample_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))
    _rest: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))

    def took(self, *, sampling_s: float, num_samples: int, rest_s: float, seconds: float) -> None:
        """Note what a window of so many seconds took of the processor."""
        if num_samples > 0:
            self._sample_s.append(sampling_s / num_samples)
        self._rest.append(rest_s / seconds)

    @property
    def interval_s(self) -> float:
        """From one sample to the next: as usual, if that costs neither too much nor little."""
        limits = self.limits
        dear_s, cheap_s = self._at_cost(limits.most_cost), self._at_cost(limits.cheap_cost)
        if dear_s > limits.usual_s:
            return min(limits.most_s, dear_s)
        return max(limits.least_s, min(limits.usual_s, cheap_s))

    def _at_cost(self, cost: float) -> float:
        """The interval at which the whole takes this share of a core."""
        if not self._sample_s:
            return self.limits.usual_s
        left = cost - median(self._rest)
        return median(self._sample_s) / left if left > 0 else self.limits.most_s
