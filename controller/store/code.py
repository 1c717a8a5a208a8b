"""Archives of code on the controller's disk, each under its digest.

An archive is there whole or not at all: it is written beside its place, checked, brought to disk,
and then renamed. What a controller that was killed had half of is deleted at the next start. Calls
here block; the event loop has them done in a thread.

What does not belong here: what is in an archive (`outlast.code`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from controller.store.reserve import MARGIN_BYTES, RESERVE_BYTES
from outlast.code.digest import DEFAULT_MAX_BYTES, file_name
from outlast.code.errors import CodeError
from outlast.code.unpack import check_digest
from outlast.errors import RetryableError

logger = logging.getLogger(__name__)

# From an upload until the job that it is for is submitted takes seconds.
KEPT_S = 3600.0
_DRAFT = ".draft-"
# What must stay free for the journal, which is on the same disk.
ROOM_BYTES = 4 * (RESERVE_BYTES + MARGIN_BYTES)


class NoRoomError(RetryableError):
    """The disk has no room for another archive."""


class CodeStore:
    """The archives of one state directory."""

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """`max_bytes` is how large one may be."""
        self.max_bytes = max_bytes
        self._folder = folder
        for draft in folder.glob(f"{_DRAFT}*"):
            draft.unlink()

    def path_of(self, digest: str) -> Path:
        """Where an archive is, if it is here.

        Raises:
            ValueError: that is no digest.
        """
        return self._folder / file_name(digest)

    def find(self, digest: str) -> bool:
        """Whether an archive is here; it then stays for an hour, whoever needs it.

        Raises:
            ValueError: that is no digest.
        """
        try:
            os.utime(self.path_of(digest))
        except FileNotFoundError:
            return False
        return True

    def begin(self, digest: str, size_bytes: int) -> Draft:
        """Take an archive in. Use it in a `with` block.

        Raises:
            CodeError: it is too large.
            NoRoomError: there is no room for it.
            ValueError: that is no digest.
        """
        path = self.path_of(digest)
        if not 0 < size_bytes <= self.max_bytes:
            raise CodeError(
                f"an archive of {size_bytes:,} bytes; allowed: 1 to {self.max_bytes:,} (code."
                "max_mib of the controller's configuration)"
            )
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._check_room(size_bytes, size_bytes)
        draft = Draft(path, digest, size_bytes)
        try:
            draft.reserve()
            # Others may have begun since: now each has what it takes.
            self._check_room(size_bytes, 0)
        except OSError as error:
            draft.discard()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room(size_bytes) from error
            raise
        except NoRoomError:
            draft.discard()
            raise
        return draft

    def _check_room(self, size_bytes: int, missing_bytes: int) -> None:
        """Whether there is room for the journal beside `missing_bytes` of an archive's."""
        if self._free_bytes() < missing_bytes + ROOM_BYTES:
            raise self._no_room(size_bytes)

    def _no_room(self, size_bytes: int) -> NoRoomError:
        return NoRoomError(
            f"the controller's disk has {self._free_bytes() >> 20} MiB left, too few for an "
            f"archive of {size_bytes >> 20} MiB beside its journal; free room there",
            after_s=10.0,
        )

    def _free_bytes(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def delete_damaged(self, digest: str) -> None:
        """Delete an archive that is not what it was: it can then be brought anew."""
        path = self.path_of(digest)
        with contextlib.suppress(OSError, CodeError):
            with path.open("rb") as file:
                check_digest(file, digest)
            return
        path.unlink(missing_ok=True)
        logger.error("code is damaged on the controller's disk, and deleted: %s", digest)

    def delete_unused(self, used: Collection[str], *, kept_s: float = KEPT_S) -> int:
        """Delete the archives that no job needs and nobody has asked for lately; how many."""
        needed = {file_name(digest) for digest in used}
        gone = 0
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            # Uploads come and go while they are looked at.
            with contextlib.suppress(FileNotFoundError):
                # A clock that was set back leaves times of the future.
                is_recent = abs(time.time() - path.stat().st_mtime) <= kept_s
                if path.name in needed or is_recent:
                    continue
                path.unlink()
                gone += 1
                logger.info("code that no job needs is deleted: sha256:%s", path.name)
        return gone


class Draft:
    """An archive that is being written; gone after the block unless it was finished."""

    def __init__(self, path: Path, digest: str, size_bytes: int) -> None:
        self._path = path
        self._draft = path.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
        self._digest = digest
        self._size_bytes = size_bytes
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        handle = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "wb")

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Delete what there is of it; nothing more once it is finished."""
        # A full disk shows when the last bytes are written.
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)

    def reserve(self) -> None:
        """Take the room for all of it.

        Raises:
            OSError: the disk does not have it.
        """
        os.posix_fallocate(self._file.fileno(), 0, self._size_bytes)

    def write(self, data: bytes) -> None:
        """Add to it.

        Raises:
            CodeError: there is more than was announced.
            OSError: the disk does not take it.
        """
        self._num_bytes += len(data)
        if self._num_bytes > self._size_bytes:
            raise CodeError(f"the archive has more than the {self._size_bytes:,} bytes announced")
        self._hash.update(data)
        self._file.write(data)

    def finish(self) -> None:
        """Put it in its place, if it is whole and what it is said to be.

        Raises:
            CodeError: it is not.
            OSError: the disk does not take it.
        """
        found = f"sha256:{self._hash.hexdigest()}"
        if (self._num_bytes, found) != (self._size_bytes, self._digest):
            raise CodeError(
                f"the archive came as {self._num_bytes:,} bytes with the digest {found}; announced "
                f"were {self._size_bytes:,} with {self._digest}"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
