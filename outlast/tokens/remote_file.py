"""A file of tokens in a store, as what reads tokens sees it: a seam, for fsspec is not known here.

`outlast.remote.files` is what is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outlast.rules.places import scheme_of


class RemoteFile(Protocol):
    """One file, as it was when it was opened.

    What reads raises StorageUnavailableError when the store does not answer, and SettingError when
    the file is no longer the one that was opened.
    """

    @property
    def url(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, of blocks that are kept on this machine."""
        ...

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Short ranges from all over the file, without the blocks around them."""
        ...

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch what will be read soon; what goes wrong is raised by the read."""
        ...

    def whole(self) -> Path:
        """All of it, in a file of this machine.

        Raises:
            SettingError: data.cache_bytes is too small for it.
            OccupiedError: the disk has no room for it now.
            OSError: the disk fails.
        """
        ...


# The file at a URL; None when there is none. Raises ValueError when a store cannot be read at all,
# and StorageUnavailableError when it does not answer.
OpenRemote = Callable[[str], RemoteFile | None]


def is_remote(name: str) -> bool:
    """Whether tokens of this name are in a store, and not at a path of each node."""
    return scheme_of(name) is not None


class RemoteTokens:
    """The tokens of a remote file; a slice of them is read when it is asked for."""

    def __init__(self, file: RemoteFile, kind: np.dtype[Any], offset_bytes: int, count: int):
        self._file = file
        self._kind = kind
        self._offset_bytes = offset_bytes
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return np.frombuffer(self._file.read(*self._range(part)), dtype=self._kind)

    def prefetch(self, parts: Sequence[slice]) -> None:
        """Begin to fetch slices that will be read soon."""
        self._file.prefetch([self._range(part) for part in parts])

    def ranges_of(self, parts: Sequence[slice]) -> list[NDArray[Any]]:
        """Short slices from all over it."""
        found = self._file.read_ranges([self._range(part) for part in parts])
        return [np.frombuffer(raw, dtype=self._kind) for raw in found]

    def _range(self, part: slice) -> tuple[int, int]:
        first, last, _ = part.indices(self._count)
        size = self._kind.itemsize
        return self._offset_bytes + first * size, self._offset_bytes + max(first, last) * size
