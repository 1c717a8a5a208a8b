"""A text file of any size as one document: cut into pieces that are tokenised a few at a time.

Memory holds some pieces, not the file. The ids are those of the whole text: a piece is tokenised
with the end of the one before in front of it, whose ids are then left out, and a cut is only made
where the tokenizer gives the text before it the same ids with and without what follows. Where no
such place is found, the piece begins as a document of its own would. Cuts follow from the text and
the tokenizer alone, so the result does not depend on how many processes or threads there are.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

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
class Piece:
    """A part of a text that is tokenised at once."""

    before: str
    """What stands in front of it to be tokenised with it; empty at the beginning of a document."""
    num_ids_before: int
    """How many ids that has."""
    text: str
    num_bytes: int
    """Read of the file for it."""


def pieces(path: Path, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of a file in pieces, in order; bytes that are no UTF-8 are replaced.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text.
    """
    before, num_ids_before, waiting, num_bytes = "", 0, "", 0
    for text, num_read in _read(path):
        waiting, num_bytes = waiting + text, num_bytes + num_read
        while len(waiting) >= PIECE_CHARACTERS + _NEAR_CHARACTERS:
            cut, num_ids = _cut(waiting, tokenizer)
            yield Piece(
                before=before,
                num_ids_before=num_ids_before,
                text=waiting[:cut],
                num_bytes=num_bytes,
            )
            before = waiting[cut - _NEAR_CHARACTERS : cut] if num_ids else ""
            num_ids_before, waiting, num_bytes = num_ids, waiting[cut:], 0
    if waiting:
        yield Piece(before=before, num_ids_before=num_ids_before, text=waiting, num_bytes=num_bytes)


def encoded(batch: list[Piece], tokenizer: Tokenizer) -> Iterator[NDArray[Any]]:
    """The ids of each piece."""
    found = tokenizer.encode_all([piece.before + piece.text for piece in batch])
    for piece, ids in zip(batch, found, strict=True):
        yield ids[piece.num_ids_before :]


def _read(path: Path) -> Iterator[tuple[str, int]]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            check_block(path, at, block)
            at += len(block)
            yield decoder.decode(block), len(block)
    yield decoder.decode(b"", final=True), 0


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
