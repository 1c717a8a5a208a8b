"""Logs of bounded size, though workers never stop writing to them.

Workers write to their log by themselves, so nothing may make them wait or fail. What is too old is
taken out of the file as a hole: its blocks are freed and every offset stays, so that neither the
worker nor a reader notices anything. In front of what is left stands a line that says what was
deleted. File systems without holes have the newest half copied to the front instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import IO

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
# A line that is longer is cut in the middle.
_MAX_LINE_BYTES = 64 * 1024
_COPY_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def trim(path: Path, max_bytes: int) -> int:
    """Delete the older part of a log that takes more than this; how many bytes that was.

    Half of `max_bytes` is left, from the beginning of a line on.

    Raises:
        OSError: the disk is full, or the file has gone.
    """
    with path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        begin = _first_data(file, 0)
        if size - begin <= max_bytes:
            return 0
        file.seek(size - max_bytes // 2)
        newline = file.read(_MAX_LINE_BYTES).find(b"\n")
        keep_from = size - max_bytes // 2 + newline + 1
        mark = (
            f"[outlast] older output deleted: {keep_from >> 20} MiB up to here; the log of a rank "
            f"may have {max_bytes >> 20} MiB (outlast agent --rank-log-mib)\n"
        ).encode()
        # The line takes the place of the end of what goes.
        mark_at = keep_from - len(mark)
        try:
            _punch(file, mark_at)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            _move_to_front(path, file, keep_from, mark)
        else:
            os.pwrite(file.fileno(), mark, mark_at)
        return mark_at - begin


def read_log(path: Path, offset: int, num_bytes: int) -> tuple[int, bytes]:
    """What stands in a log from `offset` on, with where it begins: what was deleted is left out."""
    try:
        with path.open("rb", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < offset:
                # It was written anew from the front.
                offset = 0
            begin = _first_data(file, offset)
            file.seek(begin)
            found = file.read(num_bytes)
    except FileNotFoundError:
        return offset, b""
    # A hole ends with a block; the rest of that block was zeroed.
    data = found.lstrip(b"\0")
    return begin + len(found) - len(data), data


def _first_data(file: IO[bytes], offset: int) -> int:
    """Where the first block from `offset` on begins that is no hole."""
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return file.seek(0, os.SEEK_END)
        raise


def _punch(file: IO[bytes], until: int) -> None:
    size, begin = ctypes.c_int64(until), ctypes.c_int64(0)
    if _libc.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, begin, size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _move_to_front(path: Path, file: IO[bytes], keep_from: int, mark: bytes) -> None:
    """Write the end of a log anew; a line that comes in the middle of this may be lost."""
    file.seek(keep_from)
    rest = b"".join(iter(lambda: file.read(_COPY_BYTES), b""))
    # The worker's own writes go to the end, wherever that is.
    file.truncate(0)
    with path.open("ab", buffering=0) as end:
        end.write(mark + rest)
