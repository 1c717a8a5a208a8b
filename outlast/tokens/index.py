"""The index beside a file of tokens, in Megatron-LM's format: NAME.bin and NAME.idx.

The `.bin` file has the tokens and nothing else. The `.idx` file says, in little-endian order:
9 bytes of magic, the version (uint64), the code of a token's type (uint8), how many sequences and
how many entries of the list of documents there are (uint64 each); then of each sequence its number
of tokens (int32) and its first byte (int64), and the list of documents (int64): the first sequence
of each, and at the end the number of all sequences. Here each document is one sequence, unless it
is longer than an int32 can say.

All of it is mapped into memory: an index of a billion documents costs pages, not lists.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_VERSION = 1
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES = {name: code for code, name in _TYPES.items()}
# Types of floating-point numbers, which hold no tokens.
_OTHERS = {6: "float64", 7: "float32"}
# Of a section that is read or written at a time: 4 MiB of its largest numbers.
STREAM_NUMBERS = 1 << 19
# Sequences at either end whose places are compared: enough to tell a file that is no plain list.
_NUM_CHECKED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What an `.idx` file says of its `.bin` file.

    Its header has 34 bytes, so numbers are not aligned in memory: numpy's `searchsorted` would copy
    the whole array before each search, 2 ms for a million documents. `bisect` reads 20 of them.
    """

    token_type: str
    """A name of numpy's, such as uint16."""
    lengths: NDArray[np.int32]
    """Tokens of each sequence."""
    places: NDArray[np.int64]
    """First byte of each sequence."""
    documents: NDArray[np.int64]
    """First sequence of each document, and the number of all sequences."""

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // np.dtype(self.token_type).itemsize

    def firsts(self, begin: int, end: int) -> NDArray[np.int64]:
        """The first token of documents from number `begin` to `end`, both included.

        For `num_documents` it is the end of all tokens.
        """
        # Empty documents at the end have no sequence, either.
        sequences = np.asarray(self.documents[begin : end + 1])
        found = np.asarray(self.places[np.minimum(sequences, len(self.places) - 1)])
        found = found // np.dtype(self.token_type).itemsize
        return np.where(sequences < len(self.places), found, self.num_tokens)

    def last_begun(self, token: int) -> int:
        """The last document that begins at this token or before; `num_documents` at the end."""
        if token >= self.num_tokens:
            return self.num_documents
        item = np.dtype(self.token_type).itemsize
        return bisect_right(self.documents, bisect_right(self.places, token * item) - 1) - 1

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Where documents begin among so many tokens from `first` on, counted from there."""
        item = np.dtype(self.token_type).itemsize
        ends = [bisect_left(self.places, at * item) for at in (first, first + count)]
        begun = slice(*(bisect_left(self.documents, end, 0, self.num_documents) for end in ends))
        found: NDArray[np.int64] = self.places[self.documents[begun]] // item - first
        return found

    def prompts(self, first: int, count: int) -> NDArray[np.bool_]:
        """Which of so many tokens from `first` on are of the first sequence of a document."""
        item = np.dtype(self.token_type).itemsize
        begin = bisect_right(self.places, first * item) - 1
        end = bisect_left(self.places, (first + count) * item)
        sequences = np.arange(begin, end)
        ends = (self.places[begin:end] // item - first) + self.lengths[begin:end]
        inside = np.diff(np.clip(ends, 0, count), prepend=0)
        documents = slice(*(bisect_left(self.documents, each) for each in (begin, end)))
        is_first = np.isin(sequences, self.documents[documents])
        return np.repeat(is_first, inside)

    @property
    def num_bytes(self) -> int:
        """Size that the `.bin` file must have."""
        return int(self.places[-1]) + int(self.lengths[-1]) * np.dtype(self.token_type).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """What the first bytes of an `.idx` file say."""

    token_type: str
    num_sequences: int
    num_entries: int

    @property
    def num_documents(self) -> int:
        return self.num_entries - 1

    def ranges_of_last(self) -> list[tuple[int, int]]:
        """Where in the file the length and the place of the last sequence are."""
        lengths_end = _HEADER.size + 4 * self.num_sequences
        places_end = lengths_end + 8 * self.num_sequences
        return [(lengths_end - 4, lengths_end), (places_end - 8, places_end)]

    def num_bytes(self, length: bytes, place: bytes) -> int:
        """Size that the `.bin` file must have, by what is there."""
        num_tokens, first_byte = struct.unpack("<i", length)[0], struct.unpack("<q", place)[0]
        return int(first_byte) + int(num_tokens) * np.dtype(self.token_type).itemsize


def read_index(path: Path, *, name: str | None = None) -> Index:
    """Map an index into memory; errors have its `name`, which is `path` unless given.

    Raises:
        ValueError: it is none, it is truncated, or its tokens do not lie one after the other.
        OSError: it cannot be read.
    """
    name = str(path) if name is None else name
    index = _mapped(path, read_header(path, name=name))
    _check_order(name, index)
    return index


def parse_header(header: bytes, size: int, name: str) -> IndexHeader:
    """What the first `HEADER_BYTES` of an index of `size` bytes say.

    Raises:
        ValueError: it is none, it is truncated, or it is of a kind that is not read.
    """
    if not header.startswith(MAGIC[: len(header)]) or not header:
        raise ValueError(f"{name} is no index of tokens: it does not begin with {MAGIC[:7]!r}")
    if len(header) < HEADER_BYTES:
        raise ValueError(f"{name} is truncated: it has {size} bytes, fewer than its header")
    _, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{name} is an index of version {version}; only {_VERSION} is read")
    if code not in _TYPES:
        what = _OTHERS.get(code, f"of the unknown type {code}")
        raise ValueError(f"{name}: tokens are {what}; allowed: {', '.join(_TYPES.values())}")
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_entries
    if size < expected:
        raise ValueError(
            f"{name} is truncated: it has {size:,} bytes, and an index of {num_sequences:,} "
            f"sequences has {expected:,}; copy it again"
        )
    if size == expected + num_sequences > expected:
        raise ValueError(f"{name} has a mode for each sequence: multimodal data is not read")
    if size > expected:
        raise ValueError(f"{name} has {size - expected:,} bytes more than its header says")
    if not num_sequences or num_entries < 2:
        raise ValueError(f"{name} has no documents")
    return IndexHeader(
        token_type=_TYPES[code], num_sequences=num_sequences, num_entries=num_entries
    )


def _mapped(path: Path, header: IndexHeader) -> Index:
    at = _HEADER.size

    def take(kind: str, count: int) -> NDArray[Any]:
        nonlocal at
        array = np.memmap(path, dtype=kind, mode="r", offset=at, shape=(count,))
        at += array.nbytes
        # The same memory; an element of a plain array is read several times faster.
        return np.asarray(array)

    return Index(
        token_type=header.token_type,
        lengths=take("<i4", header.num_sequences),
        places=take("<i8", header.num_sequences),
        documents=take("<i8", header.num_entries),
    )


def _check_order(name: str, index: Index) -> None:
    """Sequences are read as one long row of tokens, so they must follow each other."""
    item = np.dtype(index.token_type).itemsize
    count = len(index.lengths)
    starts_well = index.places[0] == 0 and index.documents[0] == 0
    if not starts_well or index.documents[-1] != count:
        raise ValueError(f"{name}: its documents are not all of its sequences, in order")
    for part in (slice(0, _NUM_CHECKED), slice(max(0, count - _NUM_CHECKED), count)):
        lengths, places = index.lengths[part], index.places[part]
        # Differences, and not sums, so that no int32 overflows.
        follows = np.diff(places) == lengths[:-1].astype(np.int64) * item
        if not follows.all() or (lengths < 0).any():
            raise ValueError(f"{name}: its sequences do not lie one after the other")


def read_header(path: Path, *, name: str | None = None) -> IndexHeader:
    """How much an index has, without the rest of it; errors have its `name`, `path` unless given.

    Raises:
        ValueError: it is none, or it is truncated.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return parse_header(file.read(HEADER_BYTES), path.stat().st_size, name or str(path))


def stream_lengths(path: Path) -> Iterator[NDArray[np.int32]]:
    """The tokens of each sequence of an index, some MiB at a time.

    Raises:
        ValueError: it is none, or it is truncated.
        OSError: it cannot be read.
    """
    return _stream(path, HEADER_BYTES, "<i4", read_header(path).num_sequences)


def stream_documents(path: Path) -> Iterator[NDArray[np.int64]]:
    """The first sequence of each document of an index, some MiB at a time.

    Raises:
        ValueError: it is none, or it is truncated.
        OSError: it cannot be read.
    """
    header = read_header(path)
    first_byte = HEADER_BYTES + 12 * header.num_sequences
    return _stream(path, first_byte, "<i8", header.num_documents)


def _stream(path: Path, first_byte: int, kind: str, count: int) -> Iterator[NDArray[Any]]:
    # Not mapped: pages that were read would count as memory of the process.
    with path.open("rb") as file:
        file.seek(first_byte)
        for first in range(0, count, STREAM_NUMBERS):
            size = min(STREAM_NUMBERS, count - first) * np.dtype(kind).itemsize
            yield np.frombuffer(file.read(size), dtype=kind)


def write_index(
    path: Path,
    *,
    token_type: str,
    num_sequences: int,
    num_documents: int,
    lengths: Callable[[], Iterable[NDArray[np.int32]]],
    documents: Iterable[NDArray[np.int64]],
) -> None:
    """Write an index of any size; memory holds as much as one array of its streams.

    `lengths` gives the tokens of each sequence, and is called twice: places follow from them.
    `documents` has the first sequence of each.
    """
    item_bytes = np.dtype(token_type).itemsize
    with path.open("wb") as file:
        code = _CODES[token_type]
        file.write(_HEADER.pack(MAGIC, _VERSION, code, num_sequences, num_documents + 1))
        for some in lengths():
            file.write(some.astype("<i4", copy=False).tobytes())
        num_before = 0
        for some in lengths():
            ends = np.cumsum(some, dtype=np.int64)
            file.write(((ends - some + num_before) * item_bytes).astype("<i8").tobytes())
            num_before += int(some.sum(dtype=np.int64))
        for firsts in documents:
            file.write(firsts.astype("<i8", copy=False).tobytes())
        file.write(struct.pack("<q", num_sequences))
        file.flush()
        os.fsync(file.fileno())
