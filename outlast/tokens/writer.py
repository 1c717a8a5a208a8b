"""Writing NAME.bin and NAME.idx a document at a time, in memory that does not grow with them.

Numbers of the index are known at the end, as its header says how many there are: until then those
of many documents lie in two files more, NAME.lengths and NAME.documents.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.index import STREAM_NUMBERS, write_index

_MAX_SEQUENCE = 2**31 - 1
# In memory until they go to a file: a part of a file of plain lines seldom has as many documents.
_NUMBERS_HELD = 1 << 20


class TokenWriter:
    """Writes NAME.bin and, in `close`, NAME.idx; both are complete only then."""

    def __init__(self, name: Path, token_type: str) -> None:
        """`name` is the path of both files without their endings."""
        self._name = name
        self._token_type = token_type
        self._type = np.dtype(token_type).newbyteorder("<")
        self._largest = int(np.iinfo(self._type).max)
        self._lengths = _Numbers(name.with_name(f"{name.name}.lengths"), "i")
        self._documents = _Numbers(name.with_name(f"{name.name}.documents"), "q")
        self._file: BinaryIO = name.with_name(f"{name.name}.bin").open("wb")

    def add(self, *parts: NDArray[Any]) -> None:
        """Write one document of one token at least; each part of it is a sequence.

        Raises:
            ValueError: an id is beyond the type.
        """
        self._documents.append([len(self._lengths)])
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
            self._documents.append([len(self._lengths)])
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
            token_type=self._token_type,
            num_sequences=len(self._lengths),
            num_documents=len(self._documents),
            lengths=self._lengths.stream,
            documents=self._documents.stream(),
        )
        self._lengths.remove()
        self._documents.remove()


class _Numbers:
    """A growing list of numbers: the last of them in memory, those before in a file."""

    def __init__(self, path: Path, kind: str) -> None:
        """`kind` is one of Python's arrays; the file has it in little-endian order."""
        self._path = path
        self._held = array(kind)
        self._type = np.dtype(kind).newbyteorder("<")
        self._num_written = 0

    def append(self, numbers: Sequence[int]) -> None:
        self._held.extend(numbers)
        if len(self._held) >= _NUMBERS_HELD:
            self._write()

    def _write(self) -> None:
        # What an earlier writer has left is none of these.
        with self._path.open("ab" if self._num_written else "wb") as file:
            file.write(np.asarray(self._held).astype(self._type, copy=False).tobytes())
        self._num_written += len(self._held)
        del self._held[:]

    def stream(self) -> Iterator[NDArray[Any]]:
        """All numbers, some MiB at a time."""
        if self._num_written:
            with self._path.open("rb") as file:
                while some := file.read(STREAM_NUMBERS * self._type.itemsize):
                    yield np.frombuffer(some, dtype=self._type)
        yield np.asarray(self._held)

    def remove(self) -> None:
        """Delete the file, if there is one."""
        self._path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._num_written + len(self._held)
