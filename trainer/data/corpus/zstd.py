"""Reading zstd files to their end, and saying so where that is missing.

The library's own readers end quietly in the middle of a frame, so a file that is cut at the end of
a line would be a smaller corpus.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.data.corpus.extras import library

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE_BYTES = 1 << 20


def zstandard(path: Path) -> Any:
    """The library, which `path` needs.

    Raises:
        ValueError: it is not installed.
    """
    return library("zstandard", "corpora", path)


class ZstdFile(io.RawIOBase):
    """What one or more frames in a row in a file hold, as pzstd writes them."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._library = zstandard(path)
        self._file = file
        self._frame = self._library.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        """As much as is ready; 0 at the end.

        Raises:
            EOFError: the file ends within a frame.
            OSError: it is damaged.
        """
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._file.read(_PIECE_BYTES)
            if not packed:
                if self._frame.eof:
                    return 0
                raise EOFError("it ends within a frame")
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from error
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(self._ready))
        into[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        """Close the file, too."""
        self._file.close()
        super().close()
