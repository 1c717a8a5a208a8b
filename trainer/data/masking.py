"""Masked language modelling: which tokens of a sequence are hidden, and what stands there.

A pure function of seed, step and sequence, so that any layout and any restart read the same.

Source: BERT (arXiv 1810.04805), 3.1, with other tokens in each pass over the data as in RoBERTa
(arXiv 1907.11692), 4.1.
"""

# S sequence, B micro-batch.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.data.tokens import NO_TARGET
from trainer.parallel.pipeline import MicroBatch

Array = np.ndarray[tuple[int], np.dtype[np.int64]]
# Random bits of a number in [0, 1) that a double holds.
_BITS = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """What is hidden; `outlast.masked.MaskedSpec` says what the shares are."""

    fraction: float
    mask_token: int
    random: float
    kept: float
    never: tuple[int, ...]
    vocab_size: int
    seed: int
    varies: bool = True
    """Other tokens at each step; False: a sequence always has the same ones."""

    def hide(
        self, batch: MicroBatch, step: int, samples: Sequence[int | tuple[int, int]]
    ) -> MicroBatch:
        """The batch with tokens hidden, which are its targets; none but these have a loss."""
        tokens, targets = batch.tokens.numpy().copy(), np.empty_like(batch.targets.numpy())
        for column, sample in enumerate(samples):
            key = sample_key(step if self.varies else 0, sample)
            tokens[:, column], targets[:, column] = self.hidden(tokens[:, column], key)
        return replace(
            batch,
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            num_predicted=int((targets != NO_TARGET).sum()),
        )

    def hidden(self, tokens: Array, key: tuple[int, int, int]) -> tuple[Array, Array]:
        """What a sequence becomes, and its targets. One token is predicted at least, if any may be.

        `key` is step, source and number of the sequence.
        """
        # Raw numbers of Philox are the same in every version of numpy.
        raw = np.random.Philox(key=self.seed, counter=(0, *key)).random_raw((3, len(tokens)))
        chance, kind = ((each >> np.uint64(64 - _BITS)) / 2.0**_BITS for each in raw[:2])
        chance[np.isin(tokens, self.never)] = 1.0
        chosen = chance < self.fraction
        if not chosen.any() and chance.min() < 1.0:
            chosen[chance.argmin()] = True
        others = (raw[2] % np.uint64(self.vocab_size)).astype(np.int64)
        shown = np.where(kind < self.random, others, self.mask_token)
        shown = np.where(kind >= 1.0 - self.kept, tokens, shown)
        return np.where(chosen, shown, tokens), np.where(chosen, tokens, NO_TARGET)


def sample_key(step: int, sample: int | tuple[int, int]) -> tuple[int, int, int]:
    """Step, source and number of a sequence; text is one source."""
    source, number = sample if isinstance(sample, tuple) else (0, sample)
    return step, source, number
