"""Sequences of files of tokens: mapped into memory or remote, read by source and number.

Documents lie one after the other in a file, each with what its tokenizer puts behind it, and a
sequence is cut out of that row wherever it falls: nothing is padded, and no list says where
sequences begin. Those of whole documents are in `trainer.data.packed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outlast.errors import SettingError
from outlast.tokens.files import TokenFile
from outlast.tokens.remote_file import RemoteTokens
from trainer.parallel.pipeline import MicroBatch

NO_TARGET = -1


class Row(NamedTuple):
    """A sequence and the token behind it."""

    tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
    starts: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    """For each of them where its document begins among them; None: all are one."""
    unpredicted: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Which of them have no loss, besides the first one of each document."""


class Rows(ABC):
    """The sequences of one file that belong to one split."""

    def __init__(self, file: TokenFile, *, number: int, place: Callable[[int], int] | None) -> None:
        """`place` says where in the file each of so many sequences is; None: they are all."""
        self.num_samples = number
        self.name = file.name
        self._tokens = file.tokens()
        self._place = _same if place is None else place

    @abstractmethod
    def row(self, sample: int) -> Row:
        """A sequence and the token, or the place, behind it."""

    @abstractmethod
    def starts(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """Those of its row, for which no token is read."""

    @abstractmethod
    def part(self, sample: int) -> slice:
        """What of the file it is made of."""

    @property
    def is_remote(self) -> bool:
        """Whether reading waits for what was not prefetched."""
        return isinstance(self._tokens, RemoteTokens)

    def prefetch(self, samples: Iterable[int]) -> None:
        """Begin to fetch what will be read; local files need none of it."""
        if isinstance(self._tokens, RemoteTokens):
            self._tokens.prefetch([self.part(sample) for sample in samples])


def _same(sample: int) -> int:
    return sample


class Sequences(Rows):
    """Sequences that are cut out of the stream of all documents."""

    def __init__(
        self,
        file: TokenFile,
        *,
        seq_len: int,
        number: int,
        place: Callable[[int], int] | None,
        documents: bool = False,
    ) -> None:
        """`documents`: sequences come with where theirs begin."""
        super().__init__(file, number=number, place=place)
        self._seq_len = seq_len
        self._index = file.index() if documents or file.has_prompts else None
        self._documents, self._has_prompts = documents, file.has_prompts

    def row(self, sample: int) -> Row:
        """A sequence and the token behind it."""
        part = self.part(sample)
        at, count = part.start, part.stop - part.start
        tokens = self._tokens[part].astype(np.int64)
        unpredicted = np.zeros(count, dtype=np.bool_)
        if self._index is not None and self._has_prompts:
            unpredicted = self._index.prompts(at, count)
        return Row(tokens=tokens, starts=self.starts(sample), unpredicted=unpredicted)

    def starts(self, sample: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """For each token of a row where its document begins; None: all are one."""
        if self._index is None or not self._documents:
            return None
        part = self.part(sample)
        starts = np.zeros(part.stop - part.start, dtype=np.int64)
        begun = self._index.starts(part.start, len(starts))
        starts[begun] = begun
        return np.maximum.accumulate(starts)

    def part(self, sample: int) -> slice:
        at = self._place(sample) * self._seq_len
        return slice(at, at + self._seq_len + 1)


class BlendDataset:
    """Sequences of several sources."""

    def __init__(self, sources: Sequence[Rows], *, vocab_size: int, apart: bool = True) -> None:
        """`apart`: where sequences have documents, none is predicted from another."""
        self._sources = sources
        self._vocab_size = vocab_size
        self._apart = apart

    def read(self, samples: Sequence[tuple[int, int]]) -> MicroBatch:
        """Tokens and targets of samples, given by source and number, each [S, B] int64.

        Raises:
            SettingError: an id is beyond the vocabulary. Files are looked into before the start,
                but not read to their end. To try again would not help.
        """
        read = [self._sources[source].row(sample) for source, sample in samples]
        rows = np.stack([each.tokens for each in read])
        if rows.min() < 0 or rows.max() >= self._vocab_size:
            raise SettingError(f"data: {self._beyond(rows, samples)}")
        tokens, targets = _shifted(rows)
        unpredicted = np.stack([each.unpredicted for each in read])
        # Not in place: of one sequence tokens and targets are parts of the same memory.
        targets = targets.masked_fill(_shifted(unpredicted)[1], NO_TARGET)
        starts = [each.starts for each in read]
        if starts[0] is None:
            return MicroBatch(tokens=tokens, targets=targets, num_predicted=_predicted(targets))
        of_tokens, of_targets = _shifted(np.stack([each for each in starts if each is not None]))
        if self._apart:
            # The first token of a document does not follow from the one before.
            targets = targets.masked_fill(of_targets != of_tokens, NO_TARGET)
        return MicroBatch(
            tokens=tokens,
            targets=targets,
            starts=of_tokens,
            num_predicted=_predicted(targets),
        )

    def starts(self, samples: Sequence[tuple[int, int]]) -> Tensor:
        """Those that `read` would give, [S, B] int64, of sources that come with documents.

        No token is read: where documents begin is in the index beside them.
        """
        found = [self._sources[source].starts(sample) for source, sample in samples]
        return _shifted(np.stack([each for each in found if each is not None]))[0]

    @property
    def is_remote(self) -> bool:
        """Whether any source is."""
        return any(source.is_remote for source in self._sources)

    def prefetch(self, samples: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch samples that will be read, of sources that are remote."""
        for number, source in enumerate(self._sources):
            source.prefetch(sample for of, sample in samples if of == number)

    def _beyond(self, rows: np.ndarray, samples: Sequence[tuple[int, int]]) -> str:
        is_wrong = (rows < 0) | (rows >= self._vocab_size)
        row = int(is_wrong.any(axis=1).argmax())
        at = int(is_wrong[row].argmax())
        source, sample = samples[row]
        rows_of = self._sources[source]
        # Padding is of the vocabulary: what is wrong lies in the part of the file.
        place = rows_of.part(sample).start + at
        return (
            f"{rows_of.name} has the id {rows[row][at]} as token {place} (counted from 0), beyond "
            f"model.vocab_size = {self._vocab_size}; allowed: 0 to {self._vocab_size - 1}. It was "
            "made with another tokenizer, or is damaged"
        )


def _predicted(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def _shifted(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """All but the last and all but the first of each row, as [S, B]."""
    block = torch.from_numpy(rows).t()
    return block[:-1].contiguous(), block[1:].contiguous()
