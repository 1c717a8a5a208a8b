"""AdamW on the parts of the flat buffers that this rank owns.

The same arithmetic as `torch.optim.AdamW`, in the same order, but over a bucket
at once: a handful of operations per bucket, no import of torch's compiler, and
a state that is restored bit for bit by copying two buffers. Element by element,
so ZeRO changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.parameters import FlatParameters, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """The constants of AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def ignore(_: object) -> None:
    """For who does not care what an update does when."""


class FlatAdamW:
    """Holds both moments of every parameter that a rank owns."""

    def __init__(self, flat: FlatParameters, config: AdamWConfig) -> None:
        self._flat = flat
        self._config = config
        self.exp_avg = flat.new_state()
        self.exp_avg_sq = flat.new_state()

    def reset(self) -> None:
        """Forget all steps."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()

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
        config, grads = self._config, part.grads
        exp_avg, exp_avg_sq = self.exp_avg[part.place], self.exp_avg_sq[part.place]
        decayed = part.master[part.among(part.bucket.decayed)]
        decayed.mul_(1.0 - learning_rate * config.weight_decay)
        exp_avg.lerp_(grads, 1.0 - config.beta1)
        exp_avg_sq.mul_(config.beta2).addcmul_(grads, grads, value=1.0 - config.beta2)
        root_correction = math.sqrt(1.0 - config.beta2**step)
        denominator = exp_avg_sq.sqrt().div_(root_correction).add_(config.eps)
        step_size = learning_rate / (1.0 - config.beta1**step)
        part.master.addcdiv_(exp_avg, denominator, value=-step_size)
