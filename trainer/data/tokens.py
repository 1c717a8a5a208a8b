"""Sequences of files of tokens: mapped into memory, read by source and number.

Documents lie one after the other in a file, each with what its tokenizer puts behind it, and a
sequence is cut out of that row wherever it falls: nothing is padded, and no list says where
sequences begin. Those of whole documents are in `trainer.data.packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from outlast.tokens.files import TokenFile
from trainer.parallel.pipeline import MicroBatch

NO_TARGET = -1


class Row(NamedTuple):
    """A sequence and the token behind it."""

    tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
    starts: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    """For each of them where its document begins among them; None: all are one."""
    unpredicted: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Which of them have no loss, besides the first one of each document."""


class Rows(Protocol):
    """The sequences of one file that belong to one split."""

    num_samples: int
    path: Path

    def row(self, sample: int) -> Row: ...


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

    def row(self, sample: int) -> Row:
        """A sequence and the token behind it."""
        at = (sample if self._place is None else self._place(sample)) * self._seq_len
        count = self._seq_len + 1
        tokens = self._tokens[at : at + count].astype(np.int64)
        starts, unpredicted = None, np.zeros(count, dtype=np.bool_)
        if self._index is not None and self._document_mask:
            starts = np.zeros(count, dtype=np.int64)
            begun = self._index.starts(at, count)
            starts[begun] = begun
            starts = np.maximum.accumulate(starts)
        if self._index is not None and self._has_prompts:
            unpredicted = self._index.prompts(at, count)
        return Row(tokens=tokens, starts=starts, unpredicted=unpredicted)


class BlendDataset:
    """Sequences of several sources."""

    def __init__(self, sources: Sequence[Rows], *, vocab_size: int) -> None:
        self._sources = sources
        self._vocab_size = vocab_size

    def read(self, samples: Sequence[tuple[int, int]]) -> MicroBatch:
        """Tokens and targets of samples, given by source and number, each [S, B] int64.

        Raises:
            ValueError: an id is beyond the vocabulary. Files are looked into before the start,
                but not read to their end.
        """
        read = [self._sources[source].row(sample) for source, sample in samples]
        rows = np.stack([each.tokens for each in read])
        if rows.min() < 0 or rows.max() >= self._vocab_size:
            raise ValueError(self._beyond(rows, samples))
        tokens, targets = _shifted(rows)
        unpredicted = np.stack([each.unpredicted for each in read])
        # Not in place: of one sequence tokens and targets are parts of the same memory.
        targets = targets.masked_fill(_shifted(unpredicted)[1], NO_TARGET)
        starts = [each.starts for each in read]
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
