"""A text file of any size as one document: cut into pieces that are tokenised a few at a time.

Memory holds some pieces, not the file. The ids are those of the whole text: a piece is tokenised
with the end of the one before in front of it, whose ids are then left out, and a cut is only made
where the tokenizer gives the text before it the same ids with and without what follows. Where no
such place is found, the piece begins as a document of its own would. Cuts follow from the text and
the tokenizer alone, so the result does not depend on how many processes or threads there are, nor
on where a run was interrupted.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from checkpoint.core.checked_json import Fields
from outlast.sources import check_block
from trainer.data.corpus.tokenizer_type import Tokenizer

# Enough for a thread to be busy for a while, and few enough that a batch has several.
PIECE_CHARACTERS = 1 << 18
_READ_BYTES = 1 << 20
# On either side of a cut: no token, and no word of a text that has any, is this long.
_NEAR_CHARACTERS = 256
# A second look from an odd place: from any other, a run of one letter fits tokens of 2, 4 and 8.
_ODD_CHARACTERS = 251
# Places of each kind that are tried at a cut, in the last quarter of a piece.
_NUM_TRIED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a piece of a text file begins, and all that its ids need of what is before it."""

    byte: int
    """A decoder that begins here finds the characters that it would find in the whole file."""
    skip: int
    """Characters from there on that belong to pieces before."""
    before: str
    """What is tokenised in front of the piece; empty at the beginning of a document."""
    num_ids_before: int
    """How many ids that has."""


BEGINNING = Start(byte=0, skip=0, before="", num_ids_before=0)


def parsed(fields: Fields) -> Start:
    """A start that was written down.

    Raises:
        RecordError: it is none.
    """
    return Start(
        byte=fields.integer("byte"),
        skip=fields.integer("skip"),
        before=fields.text("before"),
        num_ids_before=fields.integer("num_ids_before"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a text that is tokenised at once."""

    start: Start
    text: str
    next: Start
    """Of the piece behind it, or of the end of the file."""
    num_bytes: int
    """Read of the file for it."""


def pieces(path: Path, tokenizer: Tokenizer, start: Start = BEGINNING) -> Iterator[Piece]:
    """The text of a file from `start` on in pieces, in order; bytes that are no UTF-8 are replaced.

    Where cuts are does not depend on where it was begun.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text.
    """
    waiting, num_bytes, skip = "", 0, start.skip
    positions = _Positions(start)
    for text, byte, num_read in _read(path, start.byte):
        positions.add(byte, len(text))
        waiting, skip = waiting + text[skip:], max(0, skip - len(text))
        num_bytes += num_read
        while len(waiting) >= PIECE_CHARACTERS + _NEAR_CHARACTERS:
            cut, num_ids = _cut(waiting, tokenizer)
            before = waiting[cut - _NEAR_CHARACTERS : cut] if num_ids else ""
            behind = positions.pass_by(cut, before, num_ids)
            yield Piece(start=start, text=waiting[:cut], next=behind, num_bytes=num_bytes)
            start, waiting, num_bytes = behind, waiting[cut:], 0
    if waiting:
        behind = positions.pass_by(len(waiting), "", 0)
        yield Piece(start=start, text=waiting, next=behind, num_bytes=num_bytes)


class _Positions:
    """Where the characters are that are yet to be cut, as bytes of the file.

    Bytes that are no UTF-8 are replaced, so a text alone does not say how many bytes it was.
    """

    def __init__(self, start: Start) -> None:
        # Characters count from `start.byte` on.
        self._at = start.skip
        self._num_read = 0
        # The first character of each block that is needed still, and the byte of it.
        self._blocks: deque[tuple[int, int]] = deque()

    def add(self, byte: int, num_characters: int) -> None:
        """A block was read; its characters begin at `byte`."""
        self._blocks.append((self._num_read, byte))
        self._num_read += num_characters

    def pass_by(self, num_characters: int, before: str, num_ids_before: int) -> Start:
        """The start behind so many characters more."""
        self._at += num_characters
        while len(self._blocks) > 1 and self._blocks[1][0] <= self._at:
            self._blocks.popleft()
        first, byte = self._blocks[0]
        return Start(byte=byte, skip=self._at - first, before=before, num_ids_before=num_ids_before)


def encoded(batch: list[Piece], tokenizer: Tokenizer) -> Iterator[NDArray[Any]]:
    """The ids of each piece."""
    found = tokenizer.encode_all([piece.start.before + piece.text for piece in batch])
    for piece, ids in zip(batch, found, strict=True):
        yield ids[piece.start.num_ids_before :]


def _read(path: Path, at: int) -> Iterator[tuple[str, int, int]]:
    """Text from byte `at` on, the byte at which it begins, and how many bytes were read for it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with path.open("rb") as file:
        file.seek(at)
        while block := file.read(_READ_BYTES):
            check_block(path, at, block)
            # The first bytes of a character, whose others are in this block.
            num_waiting = len(decoder.getstate()[0])
            yield decoder.decode(block), at - num_waiting, len(block)
            at += len(block)
        num_waiting = len(decoder.getstate()[0])
        yield decoder.decode(b"", final=True), at - num_waiting, 0


def _cut(text: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Where the first piece of a text ends, and how many ids there are just before that.

    No ids where no place is good: the next piece then begins without what is before it.
    """
    places = list(_places(text))
    for place in places:
        num_ids = _ids_before(text, place, _NEAR_CHARACTERS, tokenizer)
        if num_ids and _ids_before(text, place, _ODD_CHARACTERS, tokenizer):
            return place, num_ids
    return places[0], 0


def _ids_before(text: str, place: int, near: int, tokenizer: Tokenizer) -> int:
    """How many ids so many characters before a place have; 0 where what follows changes them."""
    before = text[place - near : place]
    alone = tokenizer.encode(before).tolist()
    together = tokenizer.encode(before + text[place : place + _NEAR_CHARACTERS]).tolist()
    return len(alone) if together[: len(alone)] == alone else 0


def _places(text: str) -> Iterator[int]:
    """Places for a cut, best first: behind a line, in front of a word, and anywhere."""
    yield from islice(_behind_lines(text), _NUM_TRIED)
    yield from islice(_before_words(text), _NUM_TRIED)
    yield from range(PIECE_CHARACTERS, PIECE_CHARACTERS - _NUM_TRIED, -1)


def _behind_lines(text: str) -> Iterator[int]:
    least, at = PIECE_CHARACTERS * 3 // 4, PIECE_CHARACTERS
    while (at := text.rfind("\n", least, at)) >= 0:
        # Line ends and blanks in a row are often one token.
        if text[at + 1].isalnum() and not text[at - 1].isspace():
            yield at + 1


def _before_words(text: str) -> Iterator[int]:
    least, at = PIECE_CHARACTERS * 3 // 4, PIECE_CHARACTERS
    while (at := text.rfind(" ", least, at)) >= 0:
        if text[at + 1].isalnum() and text[at - 1].isalnum():
            yield at
