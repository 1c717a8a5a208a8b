"""Dropout masks that depend on where they are used, not on what ran before.

Each mask has a generator of its own, seeded from the job's seed, the step, the
micro-batch, the layer and the place in the layer. So a schedule may run
micro-batches in any order, recomputation repeats its masks, and a resumed run
needs no saved generator. Where a tensor is sharded over the tensor group the
rank's index is part of the seed; where it is replicated it is not, so that
ranks that share a tensor drop the same values. Ranks that have a part of the
sequence each never share one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.parallel.tensor import TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """One forward pass: of which step and micro-batch, counted over all replicas.

    `part` is that of the sequence, where ranks divide it.
    """

    seed: int
    step: int
    micro_batch: int
    part: int = 0

    def generator(self, site: str, shard: int | None, device: torch.device) -> torch.Generator:
        """A generator for `site`; `shard` is the tensor rank, None for a replicated tensor."""
        text = f"{self.seed}/{self.step}/{self.micro_batch}/{site}/{shard}"
        text += f"/{self.part}" if self.part else ""
        digest = hashlib.sha256(text.encode()).digest()
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return generator


def stream_mask(
    x_SBD: Tensor, site: str, rate: float, tp: TensorParallel, key: DropoutKey | None
) -> Tensor | None:
    """`keep_mask` of a tensor of the residual stream; None: keep all of it."""
    if key is None or rate == 0:
        return None
    # Without sequence parallelism the ranks of the group hold the same values.
    shard = tp.comm.index if tp.sequence_parallel else None
    return keep_mask(x_SBD, rate, key.generator(site, shard, x_SBD.device))


def keep_mask(like: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """0 with probability `rate`, else 1 / (1 - rate), for each value of `like`."""
    keep = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return keep.bernoulli_(1.0 - rate, generator=generator).div_(1.0 - rate)
