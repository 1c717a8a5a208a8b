"""Room on the journal's disk that is kept for the moment in which there is no other.

A file of zeros that is given up when the disk is full: what was decided last is then still
written, and a controller that starts on a full disk finds room for its first lines. Whether
there is room is found out by asking for it: a quota shows in no figure of the file system.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# The journal's write-ahead log comes to 4 MiB before it is folded into the file.
RESERVE_BYTES = 16 * 2**20
# So much must be free beside the reserve before writing begins again: as much as the log takes
# until it is folded. With less, a disk that stays full would end and begin read-only mode for ever.
MARGIN_BYTES = 4 * 2**20


class Reserve:
    """The reserve of one state directory."""

    def __init__(
        self,
        state_dir: Path,
        *,
        size_bytes: int = RESERVE_BYTES,
        margin_bytes: int = MARGIN_BYTES,
    ) -> None:
        self._path = state_dir / "reserve"
        self._size_bytes = size_bytes
        self._margin_bytes = margin_bytes

    def acquire(self) -> bool:
        """Take the room; False when the disk does not have it and as much beside it as is written.

        Done again, it changes nothing: what is held stays held, also when there is no more.
        """
        is_new = not self._path.exists()
        try:
            has_room = self._try_for(self._size_bytes + self._margin_bytes)
        except OSError as error:
            # No room for a name, a quota, a disk that is being mounted anew: there is none now.
            logger.warning("no reserve of disk space: %s: %s", self._path, error)
            has_room = False
        if is_new and not has_room:
            self.release()
        return has_room

    def release(self) -> bool:
        """Give the room up; whether there was any."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("the reserve cannot be given up: %s: %s", self._path, error)
            return False
        return True

    def free_bytes(self) -> int:
        """Room on the disk, for those who may use all of it."""
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize

    def make_room(self) -> None:
        """Before a start: give the reserve up when nothing can be written beside it."""
        if self._path.exists() and not has_room(self._path.parent, self._margin_bytes):
            self.release()

    def _try_for(self, size_bytes: int) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held_bytes = min(os.fstat(fd).st_size, self._size_bytes)
            try:
                os.posix_fallocate(fd, 0, size_bytes)
            except OSError:
                os.ftruncate(fd, held_bytes)
                raise
            os.ftruncate(fd, self._size_bytes)
        finally:
            os.close(fd)
        return True


def has_room(folder: Path, size_bytes: int) -> bool:
    """Whether a file of this size can be made in a folder now. It is gone again afterwards."""
    path = folder / f".room-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    return True
