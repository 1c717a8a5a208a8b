"""What a store must be able to do. The kinds of store are `local.py` and `stores.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder of a store. `written_at_s` is None where the store does not say."""

    name: str
    is_folder: bool
    nbytes: int
    written_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """What tells a file from another one that replaces it.

    `mark` is what the store has for that: an ETag, a generation or the time of the last change;
    "" where it has none.
    """

    nbytes: int
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A file that somebody began to write: it does not exist, but takes room.

    `token` tells it from others of the same path; only its store understands it.
    """

    path: str
    token: str
    begun_at_s: float | None


class FileWriter(Protocol):
    """A file being written in numbered parts; it does not exist before `finish`.

    Parts have one size, the last may be shorter. A store that `takes_any_order` takes
    them side by side, and a part again that failed; others take them in order, once.
    """

    @property
    def takes_any_order(self) -> bool: ...

    def write(self, index: int, chunk: memoryview) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Backend(Protocol):
    """A store. Paths are relative to its root; missing files raise FileNotFoundError."""

    def read(self, path: str, start: int | None, end: int | None) -> bytes: ...

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        """Fill `into` from byte `start` on; says how much of it, less where the file ends."""
        ...

    def size(self, path: str) -> int: ...

    def version(self, path: str) -> FileVersion: ...

    def writer(self, path: str, nbytes: int, part_bytes: int) -> FileWriter:
        """Begin a file of `nbytes`, which replaces one of that name when it is finished."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file unless it exists; says whether this call made it."""
        ...

    def entries(self, path: str) -> list[Entry]:
        """What a folder holds; nothing when it does not exist."""
        ...

    def delete_file(self, path: str) -> None: ...

    def delete_folder(self, path: str) -> None: ...

    def unfinished(self) -> list[Unfinished]:
        """Files below the root that were begun and neither finished nor aborted."""
        ...

    def discard(self, one: Unfinished) -> None:
        """Free what an unfinished file takes; nothing happens when it is gone."""
        ...
