"""Writing NAME.bin and NAME.idx a document at a time, in memory that does not grow with them.

The header of an index says how much there is, so it is written at the end: until then its numbers,
where there are many or a mark was made, lie in two files more, NAME.lengths and NAME.documents.
A writer can begin at a mark of an earlier one, whose process was killed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.index import STREAM_NUMBERS, write_index

_MAX_SEQUENCE = 2**31 - 1
# Types of Python's arrays: of tokens in a sequence, and of the first sequence of a document.
_LENGTH, _DOCUMENT = "i", "q"
# In memory until they go to a file: a part of a file of plain lines seldom has as many documents.
_NUMBERS_HELD = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How much a writer has in its files, where a crash leaves it."""

    num_tokens: int
    num_sequences: int
    num_documents: int
    num_open: int
    """The last tokens, whose document goes on."""

    def is_held_by(self, name: Path, token_type: str) -> bool:
        """Whether files of a writer, by its `name`, have as much or more."""
        sizes = {
            "bin": self.num_tokens * np.dtype(token_type).itemsize,
            "lengths": self.num_sequences * np.dtype(_LENGTH).itemsize,
            "documents": self.num_documents * np.dtype(_DOCUMENT).itemsize,
        }
        paths = {name.with_name(f"{name.name}.{ending}"): size for ending, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size >= size for path, size in paths.items())


NOTHING = Mark(num_tokens=0, num_sequences=0, num_documents=0, num_open=0)


class TokenWriter:
    """Writes NAME.bin and, in `close`, NAME.idx; both are complete only then."""

    def __init__(self, name: Path, token_type: str, mark: Mark = NOTHING) -> None:
        """`name` is the path of both files without their endings.

        With a `mark` of an earlier writer, which its files must hold, it begins there.
        """
        self._name = name
        self._token_type = token_type
        self._type = np.dtype(token_type).newbyteorder("<")
        self._largest = int(np.iinfo(self._type).max)
        self._lengths = _Numbers(
            name.with_name(f"{name.name}.lengths"), _LENGTH, mark.num_sequences
        )
        self._documents = _Numbers(
            name.with_name(f"{name.name}.documents"), _DOCUMENT, mark.num_documents
        )
        path = name.with_name(f"{name.name}.bin")
        self._file: BinaryIO = _opened_at(path, mark.num_tokens * self._type.itemsize)
        self._num_open = mark.num_open

    def add(self, *parts: NDArray[Any]) -> None:
        """Write one document of one token at least; each part of it is a sequence.

        Raises:
            ValueError: an id is beyond the type.
        """
        self._documents.append([len(self._lengths)])
        for tokens in parts:
            self._write(tokens)
            self._add_sequence(len(tokens))

    def add_piece(self, tokens: NDArray[Any]) -> None:
        """Write more of a document of one sequence, until `end_document`.

        Raises:
            ValueError: an id is beyond the type.
        """
        self._write(tokens)
        self._num_open += len(tokens)

    def end_document(self) -> None:
        """All pieces of a document have come; it is none if they had no tokens."""
        if self._num_open:
            self._documents.append([len(self._lengths)])
            self._add_sequence(self._num_open)
            self._num_open = 0

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

    @property
    def num_bytes(self) -> int:
        """Size of the tokens until now."""
        return self._file.tell()

    def mark(self) -> Mark:
        """Flush all that was written to the disk, for another writer to begin behind it."""
        self._flush()
        self._lengths.flush()
        self._documents.flush()
        return Mark(
            num_tokens=self.num_bytes // self._type.itemsize,
            num_sequences=len(self._lengths),
            num_documents=len(self._documents),
            num_open=self._num_open,
        )

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Write the index; a writer could still begin at a mark."""
        self._flush()
        self._file.close()
        write_index(
            self._name.with_name(f"{self._name.name}.idx"),
            token_type=self._token_type,
            num_sequences=len(self._lengths),
            num_documents=len(self._documents),
            lengths=self._lengths.stream,
            documents=self._documents.stream(),
        )

    def abandon(self) -> None:
        """Write no more, and no index."""
        self._file.close()

    def close(self) -> None:
        """Write the index, unless that is done, and leave nothing else."""
        if not self._file.closed:
            self.finish()
        self._lengths.remove()
        self._documents.remove()


class _Numbers:
    """A growing list of numbers: the last of them in memory, those before in a file."""

    def __init__(self, path: Path, kind: str, count: int) -> None:
        """`kind` is one of Python's arrays; the file has `count` numbers of it already."""
        self._path = path
        self._held = array(kind)
        self._type = np.dtype(kind).newbyteorder("<")
        self._num_written = count
        if count:
            os.truncate(path, count * self._type.itemsize)

    def append(self, numbers: Sequence[int]) -> None:
        self._held.extend(numbers)
        if len(self._held) >= _NUMBERS_HELD:
            self._write()

    def _write(self) -> None:
        size = self._num_written * self._type.itemsize
        with _opened_at(self._path, size) as file:
            file.write(np.asarray(self._held).astype(self._type, copy=False).tobytes())
        self._num_written += len(self._held)
        del self._held[:]

    def flush(self) -> None:
        """Have all numbers on the disk."""
        self._write()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

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


def _opened_at(path: Path, size: int) -> BinaryIO:
    """A file with its first bytes alone, to write on behind them."""
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file
