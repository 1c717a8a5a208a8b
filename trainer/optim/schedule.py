"""The learning rate of a step: linear warm-up, then a way down to a floor.

A function of the step alone, so there is nothing to save and nothing to lose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """`peak` is reached after `warmup_steps`, the floor at `steps`.

    `decay_steps` is the length of the last phase of "wsd" (warm-up, stable, decay;
    MiniCPM, arXiv 2404.06395); the others decay from the end of the warm-up.
    """

    name: Literal["cosine", "linear", "wsd", "constant"]
    peak: float
    warmup_steps: int
    min_ratio: float
    steps: int
    decay_steps: int = 0

    def at(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * self._share(step))

    def _share(self, step: int) -> float:
        """What is left of the way between peak and floor, from 1 to 0."""
        match self.name:
            case "constant":
                return 1.0
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * self._progress(step, self.warmup_steps)))
            case "linear":
                return 1.0 - self._progress(step, self.warmup_steps)
            case "wsd":
                start = max(self.warmup_steps, self.steps - self.decay_steps)
                return 1.0 - self._progress(step, start)
            case _:
                assert_never(self.name)

    def _progress(self, step: int, start: int) -> float:
        span = max(1, self.steps - start)
        return min(1.0, max(0.0, (step - start) / span))
