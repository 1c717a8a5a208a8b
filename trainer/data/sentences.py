"""The order of two parts: where a sequence is cut, and whether the second part comes first.

A pure function of seed, step and sequence, so that any layout and any restart read the same.

Source: ALBERT (arXiv 1909.11942), 3.1; the tokens around the parts are BERT's (arXiv 1810.04805).
"""

# S sequence, B micro-batch.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.data.masking import Array, sample_key
from trainer.parallel.pipeline import MicroBatch, Sentences

# Before the parts, between them and behind them.
NUM_ADDED = 3
# Numbers that masking does not draw.
_COUNTER = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceOrder:
    """How sequences are cut; `outlast.masked.SentenceOrderSpec` says what the ids are."""

    cls_token: int
    sep_token: int
    ends: tuple[int, ...]
    seed: int
    varies: bool = True
    """Other cuts at each step; False: a sequence always has the same one."""

    def arrange(
        self, batch: MicroBatch, step: int, samples: Sequence[int | tuple[int, int]]
    ) -> MicroBatch:
        """The batch with its sequences in two parts each. Their targets are left as they were."""
        tokens = batch.tokens.numpy().copy()
        segments, swapped = np.zeros_like(tokens), np.zeros(len(samples), dtype=np.int64)
        for column, sample in enumerate(samples):
            key = sample_key(step if self.varies else 0, sample)
            arranged = self.arranged(tokens[:, column], key)
            tokens[:, column], segments[:, column], swapped[column] = arranged
        sentences = Sentences(
            segments=torch.from_numpy(segments), swapped=torch.from_numpy(swapped)
        )
        return replace(batch, tokens=torch.from_numpy(tokens), sentences=sentences)

    def arranged(self, tokens: Array, key: tuple[int, int, int]) -> tuple[Array, Array, bool]:
        """What a sequence becomes, the part that each token is of, and whether they are swapped.

        `key` is step, source and number of the sequence.
        """
        place, coin = np.random.Philox(key=self.seed, counter=(_COUNTER, *key)).random_raw(2)
        kept = tokens[: len(tokens) - NUM_ADDED]
        # Neither part is empty.
        cuts = np.flatnonzero(np.isin(kept[:-1], self.ends)) + 1
        if not len(cuts):
            cuts = np.arange(1, len(kept))
        parts = np.split(kept, [cuts[int(place) % len(cuts)]])
        is_swapped = bool(int(coin) >> 63)
        first, second = reversed(parts) if is_swapped else parts
        shown = np.concatenate(
            ([self.cls_token], first, [self.sep_token], second, [self.sep_token])
        ).astype(tokens.dtype)
        segments = np.zeros_like(shown)
        segments[len(first) + 2 :] = 1
        return shown, segments, is_swapped
