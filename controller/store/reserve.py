"""Room on the journal's disk that is kept for the moment in which there is no other.

A file of zeros that is given up when the disk is full: what was decided last is then still
written, and a controller that starts on a full disk finds room for its first lines.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# The journal's write-ahead log comes to 4 MiB before it is folded into the file.
RESERVE_BYTES = 16 * 2**20


class Reserve:
    """The reserve of one state directory."""

    def __init__(self, state_dir: Path, *, size_bytes: int = RESERVE_BYTES) -> None:
        self._path = state_dir / "reserve"
        self._size_bytes = size_bytes

    def acquire(self) -> bool:
        """Take the room; False when the disk does not have it. Done again, it changes nothing."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._path.unlink(missing_ok=True)
            return False
        finally:
            os.close(fd)
        return True

    def release(self) -> bool:
        """Give the room up; whether there was any."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def free_bytes(self) -> int:
        """Room on the disk, for those who may use all of it."""
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize

    def make_room(self) -> None:
        """Before a start: give the reserve up when the disk has less than that."""
        if self.free_bytes() < self._size_bytes // 4:
            self.release()
