"""Sequences of files of tokens: mapped into memory, read by source and number.

Documents lie one after the other in a file, each with what its tokenizer puts behind it, and a
sequence is cut out of that row wherever it falls: nothing is padded, and no list says where
sequences begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outlast.tokens.files import TokenFile
from trainer.parallel.pipeline import MicroBatch

NO_TARGET = -1


class Sequences:
    """The sequences of one file that belong to one split."""

    def __init__(
        self,
        file: TokenFile,
        *,
        seq_len: int,
        number: int,
        place: Callable[[int], int] | None,
        document_mask: bool = False,
    ) -> None:
        """`place` says where in the file each of so many sequences is; None: they are all."""
        self.num_samples = number
        self.path = file.path
        self._tokens = file.tokens()
        self._seq_len = seq_len
        self._place = place
        self._index = file.index() if document_mask or file.has_prompts else None
        self._document_mask, self._has_prompts = document_mask, file.has_prompts

    def read(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens of a sequence and the one behind it."""
        at = self._first(sample)
        row: np.ndarray[tuple[int], np.dtype[np.int64]]
        row = self._tokens[at : at + self._seq_len + 1].astype(np.int64)
        return row

    def starts(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """For each of those tokens where its document begins among them; None: all are one."""
        if self._index is None or not self._document_mask:
            return None
        starts = np.zeros(self._seq_len + 1, dtype=np.int64)
        begun = self._index.starts(self._first(sample), len(starts))
        starts[begun] = begun
        return np.maximum.accumulate(starts)

    def prompts(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of those tokens are of a prompt."""
        if self._index is None or not self._has_prompts:
            return np.zeros(self._seq_len + 1, dtype=np.bool_)
        found: np.ndarray[tuple[int], np.dtype[np.bool_]]
        found = self._index.prompts(self._first(sample), self._seq_len + 1)
        return found

    def _first(self, sample: int) -> int:
        return (sample if self._place is None else self._place(sample)) * self._seq_len


class BlendDataset:
    """Sequences of several sources."""

    def __init__(self, sources: Sequence[Sequences], *, vocab_size: int) -> None:
        self._sources = sources
        self._vocab_size = vocab_size

    def read(self, samples: Sequence[tuple[int, int]]) -> MicroBatch:
        """Tokens and targets of samples, given by source and number, each [S, B] int64.

        Raises:
            ValueError: an id is beyond the vocabulary. Files are looked into before the start,
                but not read to their end.
        """
        rows = np.stack([self._sources[source].read(sample) for source, sample in samples])
        if rows.min() < 0 or rows.max() >= self._vocab_size:
            raise ValueError(self._beyond(rows, samples))
        tokens, targets = _shifted(rows)
        prompts = np.stack([self._sources[source].prompts(sample) for source, sample in samples])
        # Not in place: of one sequence tokens and targets are parts of the same memory.
        targets = targets.masked_fill(_shifted(prompts)[1], NO_TARGET)
        starts = [self._sources[source].starts(sample) for source, sample in samples]
        if starts[0] is None:
            return MicroBatch(tokens=tokens, targets=targets, num_predicted=_predicted(targets))
        of_tokens, of_targets = _shifted(np.stack([each for each in starts if each is not None]))
        # The first token of a document does not follow from the one before.
        targets = targets.masked_fill(of_targets != of_tokens, NO_TARGET)
        return MicroBatch(
            tokens=tokens,
            targets=targets,
            starts=of_tokens,
            num_predicted=_predicted(targets),
        )

    def _beyond(self, rows: np.ndarray, samples: Sequence[tuple[int, int]]) -> str:
        is_wrong = (rows < 0) | (rows >= self._vocab_size)
        row = int(is_wrong.any(axis=1).argmax())
        source, sample = samples[row]
        return (
            f"data.tokens: {self._sources[source].path} has the id {rows[row][is_wrong[row]][0]} "
            f"in sequence {sample}, beyond model.vocab_size = {self._vocab_size}; it was made "
            "with another tokenizer, or is damaged"
        )


def _predicted(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def _shifted(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """All but the last and all but the first of each row, as [S, B]."""
    block = torch.from_numpy(rows).t()
    return block[:-1].contiguous(), block[1:].contiguous()
