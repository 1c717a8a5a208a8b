"""AdamW on the parts of the flat buffers that this rank owns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.model.parameters import FlatParameters, Part
from trainer.optim.adam import AdamMoments, AdamWConfig, ignore


class FlatAdamW(AdamMoments):
    """One update of all parts after the other."""

    def __init__(self, flat: FlatParameters, config: AdamWConfig) -> None:
        super().__init__(flat, config)
        self._flat = flat

    @torch.no_grad()
    def step(
        self,
        step: int,
        learning_rate: float,
        *,
        changes: Callable[[Tensor], None] = ignore,
        updated: Callable[[Part], None] = ignore,
    ) -> None:
        """One update from the gradients of the own parts; `step` counts updates from 1.

        `changes` is called with each buffer before it changes, `updated` with each part as
        soon as its weights are new.
        """
        for part in self._flat.parts:
            for buffer in (part.master, self.exp_avg[part.place], self.exp_avg_sq[part.place]):
                changes(buffer)
            self._update(part, step, learning_rate)
            updated(part)

    def _update(self, part: Part, step: int, learning_rate: float) -> None:
        config = self._config
        decayed = part.master[part.among(part.bucket.decayed)]
        decayed.mul_(1.0 - learning_rate * config.weight_decay)
        exp_avg, denominator = self._advance(part, step)
        step_size = learning_rate / (1.0 - config.beta1**step)
        part.master.addcdiv_(exp_avg, denominator, value=-step_size)
