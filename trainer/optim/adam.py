"""What AdamW and LAMB share: both moments of each gradient, and how they move.

The same arithmetic as `torch.optim.AdamW`, in the same order, but over a bucket
at once: a handful of operations per bucket, no import of torch's compiler, and
a state that is restored bit for bit by copying two buffers. Element by element,
so ZeRO changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


class AdamMoments:
    """Holds both moments of every parameter that a rank owns."""

    def __init__(self, flat: FlatParameters, config: AdamWConfig) -> None:
        self._config = config
        self.exp_avg = flat.new_state()
        self.exp_avg_sq = flat.new_state()

    def reset(self) -> None:
        """Forget all steps."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()

    def _advance(self, part: Part, step: int) -> tuple[Tensor, Tensor]:
        """Take in the gradients of `part`: its first moment, and what that is to be divided by.

        The first moment's correction, `1 - beta1**step`, is left to the caller.
        """
        config, grads = self._config, part.grads
        exp_avg, exp_avg_sq = self.exp_avg[part.place], self.exp_avg_sq[part.place]
        exp_avg.lerp_(grads, 1.0 - config.beta1)
        exp_avg_sq.mul_(config.beta2).addcmul_(grads, grads, value=1.0 - config.beta2)
        root_correction = math.sqrt(1.0 - config.beta2**step)
        return exp_avg, exp_avg_sq.sqrt().div_(root_correction).add_(config.eps)
