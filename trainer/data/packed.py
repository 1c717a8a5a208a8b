"""Sequences of whole documents: a slice of the file each, and padding behind it.

Padding is a document of its own, so that no token of another one sees it, and none of it is
predicted. Which documents a sequence holds: `outlast.tokens.packing`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outlast.rules.data import PADDING
from outlast.tokens.files import TokenFile
from outlast.tokens.packing import Packing
from trainer.data.tokens import Row


class PackedSequences:
    """The sequences of one file that belong to one split, documents packed whole."""

    def __init__(
        self,
        file: TokenFile,
        packing: Packing,
        *,
        seq_len: int,
        number: int,
        place: Callable[[int], int] | None,
    ) -> None:
        """`place` says where in the packing each of so many sequences is; None: they are all."""
        self.num_samples = number
        self.path = file.path
        self._tokens, self._index = file.tokens(), file.index()
        self._packing = packing
        self._row_tokens = seq_len + 1
        self._place = place
        self._has_prompts = file.has_prompts

    def row(self, sample: int) -> Row:
        """A sequence and the place behind it."""
        first, count = self._packing.span(sample if self._place is None else self._place(sample))
        tokens = np.full(self._row_tokens, PADDING, dtype=np.int64)
        tokens[:count] = self._tokens[first : first + count]
        starts = np.zeros(self._row_tokens, dtype=np.int64)
        begun = self._index.starts(first, count)
        starts[begun] = begun
        starts[count:] = count
        unpredicted = np.ones(self._row_tokens, dtype=np.bool_)
        unpredicted[:count] = self._index.prompts(first, count) if self._has_prompts else False
        return Row(tokens=tokens, starts=np.maximum.accumulate(starts), unpredicted=unpredicted)
