"""The learning rate of a step: linear warm-up, then cosine or constant.

A function of the step alone, so there is nothing to save and nothing to lose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """`peak` is reached after `warmup_steps`, the floor at `steps`."""

    name: Literal["cosine", "constant"]
    peak: float
    warmup_steps: int
    min_ratio: float
    steps: int

    def at(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.name == "constant":
            return self.peak
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * cosine)
