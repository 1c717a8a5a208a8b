"""Whole documents packed into sequences: where each sequence begins, from the index alone.

Next-fit in the order of the file: a sequence takes one document after the other until the next one
does not fit, and that one begins the next sequence. Nothing is reordered, so a sequence is one
slice of the file, documents that share a sequence do so on every pass, and what is shuffled is
sequences, as where they are cut out of one stream. A document that is longer than a sequence has
one to itself, and loses its end.

Next-fit can only be followed from where a sequence begins, so one pass over the index notes where
every 32nd does, in host memory: a billion sequences take 250 MB. It takes 0.2 to 0.4 us for each
document and is made anew by each process that reads: 2 to 4 s for ten million documents.

What does not belong here: reading tokens (`trainer.data.packed`).
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.index import Index

# Up to this many are followed again before one is read, which takes 50 to 100 us.
STRIDE = 32
# Documents of which the pass holds some numbers of 8 bytes at a time.
_CHUNK_DOCUMENTS = 1 << 18


class Packing:
    """The sequences of one file of tokens."""

    def __init__(
        self,
        index: Index,
        *,
        row_tokens: int,
        has_prompts: bool = False,
        chunk_documents: int = _CHUNK_DOCUMENTS,
    ) -> None:
        """`row_tokens` is the length of a sequence with the token behind it.

        `has_prompts`: the first sequence of each document in the index is not predicted.

        Raises:
            ValueError: documents do not lie one after the other.
        """
        self.num_sequences = 0
        self.num_cut = 0
        """Documents that are longer than a sequence."""
        self.num_tokens_cut = 0
        """Tokens of them that are in no sequence."""
        self.num_without_loss = 0
        """Documents in which nothing is predicted, as where a prompt alone fills a sequence."""
        self.num_documents = index.num_documents
        self._index, self._row_tokens, self._has_prompts = index, row_tokens, has_prompts
        # The first document of every 32nd sequence (`STRIDE`).
        self._anchors = array("q")
        self._pass(chunk_documents)

    @property
    def padding_share(self) -> float:
        """Which part of all sequences is padding."""
        room = self.num_sequences * self._row_tokens
        return 1 - (self._index.num_tokens - self.num_tokens_cut) / room if room else 0.0

    def span(self, number: int) -> tuple[int, int]:
        """The first token of a sequence, and how many there are before its padding."""
        if not 0 <= number < self.num_sequences:
            raise ValueError(f"sequence {number} is not in 0..{self.num_sequences - 1}")
        document, wanted = self._anchors[number // STRIDE], number % STRIDE
        # Twice the mean: most are found at the first try.
        size = 2 * (wanted + 2) * self.num_documents // self.num_sequences
        while True:
            last = min(document + size, self.num_documents)
            firsts = self._index.firsts(document, last)
            begun, rest = packed(firsts, self._row_tokens, is_end=last == self.num_documents)
            if len(begun) > wanted:
                break
            size *= 2
        first, end = firsts[[*begun, rest][wanted : wanted + 2]].tolist()
        return first, min(end - first, self._row_tokens)

    def _pass(self, chunk_documents: int) -> None:
        # Empty documents go to the sequence before, so that none consists of them alone.
        index = self._index
        first, size = index.last_begun(0), chunk_documents
        self._count(0, index.firsts(0, first))
        while first < self.num_documents:
            last = min(first + size, self.num_documents)
            firsts = index.firsts(first, last)
            if (np.diff(firsts) < 0).any():
                raise ValueError(
                    f"documents {first:,} to {last:,} do not lie one after the other; the index "
                    "is damaged or of another corpus"
                )
            begun, rest = packed(firsts, self._row_tokens, is_end=last == self.num_documents)
            anchors = begun[-self.num_sequences % STRIDE :: STRIDE]
            self._anchors.extend(first + each for each in anchors)
            self.num_sequences += len(begun)
            self._count(first, firsts[: rest + 1])
            first += rest
            # One sequence may hold more documents than were looked at.
            size = chunk_documents if rest else 2 * size

    def _count(self, first: int, firsts: NDArray[np.int64]) -> None:
        """Add up what becomes of documents from number `first` on."""
        lengths = np.diff(firsts)
        kept = np.minimum(lengths, self._row_tokens)
        self.num_cut += int((lengths > kept).sum())
        self.num_tokens_cut += int((lengths - kept).sum())
        # The first token of a document is never predicted.
        unpredicted = np.ones_like(lengths)
        if self._has_prompts:
            index = self._index
            sequences = index.documents[first : first + len(lengths)]
            # Empty documents at the end have no sequence.
            lasts = np.minimum(sequences, len(index.lengths) - 1)
            unpredicted = np.maximum(index.lengths[lasts], 1)
        self.num_without_loss += int((kept <= unpredicted).sum())


def packed(firsts: NDArray[np.int64], row_tokens: int, *, is_end: bool) -> tuple[list[int], int]:
    """Which documents begin a sequence, and which one begins the sequence behind these.

    `firsts` has the first token of each document, and where the last one ends; the first of them
    begins a sequence and is not empty. Unless `is_end`, documents follow that may still fit into
    the last sequence, so that this one is not among those found.
    """
    # As far as a sequence goes, or to the end of one document that is longer.
    ends = np.maximum(firsts[:-1] + row_tokens, firsts[1:])
    behind = (np.searchsorted(firsts, ends, "right") - 1).tolist()
    found, document, last = [], 0, len(behind)
    while document < last and (is_end or behind[document] < last):
        found.append(document)
        document = behind[document]
    return found, document
