"""Sequences of tokens in a memory-mapped file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trainer.parallel.pipeline import MicroBatch


class TokenDataset:
    """Non-overlapping sequences; each is `seq_len` tokens and their successors."""

    def __init__(self, path: Path, *, seq_len: int) -> None:
        """Map the file.

        Raises:
            ValueError: it holds less than one sequence.
        """
        num_tokens = path.stat().st_size
        # The last token of a sequence needs a successor.
        self.num_samples = (num_tokens - 1) // seq_len
        if self.num_samples < 1:
            raise ValueError(
                f"{path} holds {num_tokens} tokens, fewer than one sequence of "
                f"model.seq_len + 1 = {seq_len + 1}; give more text, a larger "
                "data.validation_fraction or a shorter sequence"
            )
        self._tokens = np.memmap(path, dtype=np.uint8, mode="r")
        self._seq_len = seq_len

    def read(self, samples: Sequence[int]) -> MicroBatch:
        """Tokens and targets of `samples`, each [S, B] int64."""
        length = self._seq_len
        rows = np.stack([self._tokens[s * length : (s + 1) * length + 1] for s in samples])
        block = torch.from_numpy(rows.astype(np.int64)).t()
        return MicroBatch(
            tokens=block[:-1].contiguous(),
            targets=block[1:].contiguous(),
            num_predicted=len(samples) * length,
        )
