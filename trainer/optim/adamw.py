"""AdamW on one flat buffer.

The same arithmetic as `torch.optim.AdamW`, in the same order, but over all of
a rank's parameters at once: a handful of operations per step whatever the
number of tensors, no import of torch's compiler, and a state that is restored
bit for bit by copying two buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainer.model.parameters import FlatParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """The constants of AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class FlatAdamW:
    """Holds both moments of every parameter of a rank."""

    def __init__(self, flat: FlatParameters, config: AdamWConfig) -> None:
        self._flat = flat
        self._config = config
        self.exp_avg = torch.zeros_like(flat.values)
        self.exp_avg_sq = torch.zeros_like(flat.values)

    @torch.no_grad()
    def step(self, step: int, learning_rate: float) -> None:
        """One update from the gradients in the flat buffer; `step` counts from 1."""
        config, values, grads = self._config, self._flat.values, self._flat.grads
        values[self._flat.decayed].mul_(1.0 - learning_rate * config.weight_decay)
        self.exp_avg.lerp_(grads, 1.0 - config.beta1)
        self.exp_avg_sq.mul_(config.beta2).addcmul_(grads, grads, value=1.0 - config.beta2)
        root_correction = math.sqrt(1.0 - config.beta2**step)
        denominator = self.exp_avg_sq.sqrt().div_(root_correction).add_(config.eps)
        step_size = learning_rate / (1.0 - config.beta1**step)
        values.addcdiv_(self.exp_avg, denominator, value=-step_size)
