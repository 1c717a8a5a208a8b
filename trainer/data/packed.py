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
from trainer.data.tokens import Row, Rows


class PackedSequences(Rows):
    """Sequences into which documents are packed whole."""

    def __init__(
        self,
        file: TokenFile,
        packing: Packing,
        *,
        seq_len: int,
        number: int,
        place: Callable[[int], int] | None,
    ) -> None:
        super().__init__(file, number=number, place=place)
        self._index = file.index()
        self._packing = packing
        self._row_tokens = seq_len + 1
        self._has_prompts = file.has_prompts

    def row(self, sample: int) -> Row:
        """A sequence and the place behind it."""
        part = self.part(sample)
        first, count = part.start, part.stop - part.start
        tokens = np.full(self._row_tokens, PADDING, dtype=np.int64)
        tokens[:count] = self._tokens[part]
        unpredicted = np.ones(self._row_tokens, dtype=np.bool_)
        unpredicted[:count] = self._index.prompts(first, count) if self._has_prompts else False
        return Row(tokens=tokens, starts=self.starts(sample), unpredicted=unpredicted)

    def starts(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """For each place of a row where its document begins, or the padding."""
        part = self.part(sample)
        count = part.stop - part.start
        starts = np.zeros(self._row_tokens, dtype=np.int64)
        begun = self._index.starts(part.start, count)
        starts[begun] = begun
        starts[count:] = count
        return np.maximum.accumulate(starts)

    def part(self, sample: int) -> slice:
        first, count = self._packing.span(self._place(sample))
        return slice(first, first + count)
