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
import shutil
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
_COPY_BYTES = 1 << 22
_MAX_SEQUENCE = 2**31 - 1
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
    with path.open("rb") as file:
        header = parse_header(file.read(HEADER_BYTES), path.stat().st_size, name)
    index = _mapped(path, header)
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


class TokenWriter:
    """Writes NAME.bin and, in `close`, NAME.idx; both are complete only then.

    Memory holds one number for each document.
    """

    def __init__(self, name: Path, token_type: str) -> None:
        """`name` is the path of both files without their endings."""
        self._name = name
        self._type = np.dtype(token_type).newbyteorder("<")
        self._largest = int(np.iinfo(self._type).max)
        self._code = _CODES[token_type]
        self._lengths = _Numbers("<i4")
        self._sequences = _Numbers("<i8")
        self._file: BinaryIO = name.with_name(f"{name.name}.bin").open("wb")

    def add(self, *parts: NDArray[Any]) -> None:
        """Write one document of one token at least; each part of it is a sequence.

        Raises:
            ValueError: an id is beyond the type.
        """
        self._sequences.append([len(self._lengths)])
        for tokens in parts:
            self._write(tokens)
            self._add_sequence(len(tokens))

    def add_pieces(self, pieces: Iterable[NDArray[Any]]) -> None:
        """Write one document of one sequence as its pieces come; nothing if they have no tokens."""
        count = 0
        for tokens in pieces:
            self._write(tokens)
            count += len(tokens)
        if count:
            self._sequences.append([len(self._lengths)])
            self._add_sequence(count)

    def _write(self, tokens: NDArray[Any]) -> None:
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() <= self._largest):
            raise ValueError(
                f"{self._name}: ids from {tokens.min()} to {tokens.max()}; allowed in "
                f"{self._type.name}: 0 to {self._largest}"
            )
        self._file.write(tokens.astype(self._type, copy=False).tobytes())

    def _add_sequence(self, count: int) -> None:
        lengths = [_MAX_SEQUENCE] * (count // _MAX_SEQUENCE)
        rest = count % _MAX_SEQUENCE
        # An empty prompt is a sequence, too.
        self._lengths.append(lengths if lengths and not rest else [*lengths, rest])

    def close(self) -> None:
        """Write the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_index(
            self._name.with_name(f"{self._name.name}.idx"),
            code=self._code,
            lengths=self._lengths.all(),
            documents=self._sequences.all(),
            item_bytes=self._type.itemsize,
        )


def join_pairs(pairs: Sequence[Path], name: Path, token_type: str) -> bool:
    """Write the documents of all `pairs`, in their order, as one; False if they have none.

    Memory holds one number for each document.
    """
    lengths, documents = _Numbers("<i4"), _Numbers("<i8")
    with name.with_name(f"{name.name}.bin").open("wb") as joined:
        for pair in pairs:
            tokens = pair.with_name(f"{pair.name}.bin")
            if not tokens.stat().st_size:
                continue
            index = read_index(pair.with_name(f"{pair.name}.idx"))
            documents.append(index.documents[:-1] + len(lengths))
            lengths.append(index.lengths)
            with tokens.open("rb") as part:
                shutil.copyfileobj(part, joined, _COPY_BYTES)
        joined.flush()
        os.fsync(joined.fileno())
    if not len(lengths):
        name.with_name(f"{name.name}.bin").unlink()
        return False
    write_index(
        name.with_name(f"{name.name}.idx"),
        code=_CODES[token_type],
        lengths=lengths.all(),
        documents=documents.all(),
        item_bytes=np.dtype(token_type).itemsize,
    )
    return True


def write_index(
    path: Path,
    *,
    code: int,
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    item_bytes: int,
) -> None:
    """Write an index; `documents` has the first sequence of each, without the number of all."""
    places = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=places[1:])
    places *= item_bytes
    with path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, _VERSION, code, len(lengths), len(documents) + 1))
        file.write(lengths.astype("<i4", copy=False).tobytes())
        file.write(places.tobytes())
        file.write(documents.astype("<i8", copy=False).tobytes())
        file.write(struct.pack("<q", len(lengths)))
        file.flush()
        os.fsync(file.fileno())


class _Numbers:
    """A growing list of numbers that takes no more memory than they need."""

    def __init__(self, kind: str) -> None:
        self._buffer = bytearray()
        self._kind = np.dtype(kind)

    def append(self, numbers: Sequence[int] | NDArray[Any]) -> None:
        self._buffer += np.asarray(numbers, dtype=self._kind).tobytes()

    def all(self) -> NDArray[Any]:
        return np.frombuffer(self._buffer, dtype=self._kind)

    def __len__(self) -> int:
        return len(self._buffer) // self._kind.itemsize
