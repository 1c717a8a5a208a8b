"""Dynamic loss scaling for fp16: the loss is multiplied so that gradients do not vanish.

An overflow shows in the gradient norm. Its step is skipped and the scale halves;
after long enough without one it doubles (Micikevicius et al., arXiv 1710.03740).
All of it is state: it goes into checkpoints, so that a resumed run skips alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class LossScale:
    """`scale` of the next step, good steps since it last changed, and steps skipped so far."""

    scale: float
    growth_interval: int
    minimum: float
    good_steps: int = 0
    skipped: int = 0

    @property
    def is_smallest(self) -> bool:
        """Whether another overflow could not be answered by a smaller scale."""
        return self.scale <= self.minimum

    def shrink(self) -> None:
        """A step overflowed and was skipped."""
        self.scale = max(self.minimum, self.scale / 2.0)
        self.good_steps = 0
        self.skipped += 1

    def advance(self) -> None:
        """A step was good."""
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2.0
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped = int(state["skipped"])
