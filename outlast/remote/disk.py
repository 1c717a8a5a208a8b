"""Blocks of remote files on a node's disk, shared by all processes of the node, within a bound.

A block is a file that appears by a rename, and ends with a checksum of the rest: one that a crash
or a full disk has cut is read as if it were not there. How many bytes are taken stands in a file of
its own, added to under a lock before anything is written, so that processes side by side keep to
the bound together. A write that would exceed it first counts the files and deletes those that were
not read for longest.

Blocks are not needed: where the disk is full or fails, they are read from the store each time.
Whole files (indexes) are mapped into memory, so they need room on the disk. A process that uses one
holds a lock on it, and it is not deleted meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from checkpoint.checksums import CHECKSUM, block_checksum
from outlast.errors import OccupiedError
from outlast.remote.blocks import KeptFile, to_evict

logger = logging.getLogger(__name__)

_USAGE, _DRAFT, _LOCK = "usage", ".draft", ".lock"
_NUMBER = struct.Struct("<Q")
# What each count of the files frees: counting a quarter of a million takes a second.
_FREED_SHARE = 8
# The share of the disk that stays free, whatever the bound: logs and checkpoints may need it.
_FREE_SHARE = 20
# Reading what becomes a file has deadlines of minutes: older drafts are of processes that died.
_DRAFT_AGE_S = 3600.0
# Another process may be filling a file of gigabytes. Less than a first step may take.
LOCK_WAIT_S = 900.0
_LOCK_CHECK_S = 0.05


class BlockFolder:
    """The cache of one node. Thread-safe, and safe to use from several processes."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = folder
        self.is_unwritable = False
        """Whether the last block was not kept: what is prefetched would be fetched again."""
        self._warned: set[str] = set()
        self._in_use: list[int] = []

    def close(self) -> None:
        """Whole files that were used may be deleted from now on."""
        while self._in_use:
            os.close(self._in_use.pop())

    def read(self, name: str) -> bytes | None:
        """What was written by this name; None when it is not there, or damaged."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                raw = file.read()
                # What is evicted goes by the time of the last use.
                os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("failure", str(error))
            return None
        data, end = raw[: -_NUMBER.size], raw[-_NUMBER.size :]
        if len(end) == _NUMBER.size and _NUMBER.unpack(end)[0] == block_checksum(CHECKSUM, data):
            return data
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None

    def has(self, name: str) -> bool:
        """Whether there is such a file, which counts as used then."""
        try:
            os.utime(self._folder / name)
        except OSError:
            return False
        return True

    def write(self, name: str, data: bytes) -> None:
        """Keep `data` by a name, if there is room for it."""
        nbytes = len(data) + _NUMBER.size
        try:
            if nbytes > self.max_bytes or not self._has_free(nbytes):
                self.is_unwritable = True
                self._warn(
                    "room",
                    f"no room for {nbytes:,} bytes in {self._folder}: data.cache_bytes is "
                    f"{self.max_bytes:,}, and a twentieth of the disk stays free",
                )
                return
            self._reserve(nbytes)
            with self._draft(name) as file:
                file.write(data)
                file.write(_NUMBER.pack(block_checksum(CHECKSUM, data)))
            self.is_unwritable = False
        except OSError as error:
            self.is_unwritable = True
            self._warn("failure", str(error))

    def whole(self, name: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> Path:
        """A file of `nbytes` that is used in place; the first of the node's processes fills it.

        It stays until this cache is closed, or its process ends.

        Raises:
            ValueError: it is larger than the bound.
            OccupiedError: this node's disk has no room for it now.
            OSError: it cannot be written here, or another process does not end filling it.
        """
        if nbytes > self.max_bytes:
            raise ValueError(
                f"has {nbytes:,} bytes and must be kept whole, and data.cache_bytes is "
                f"{self.max_bytes:,}; allowed: {nbytes:,} or more"
            )
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_path = path.with_name(f"{path.name}{_LOCK}")
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        until_s = time.monotonic() + LOCK_WAIT_S
        try:
            while not self._try_hold(name, lock, nbytes, fill):
                if time.monotonic() > until_s:
                    raise TimeoutError(
                        f"{lock_path}: another process of this node has held the lock for "
                        f"{LOCK_WAIT_S:g} s"
                    )
                time.sleep(_LOCK_CHECK_S)
        except BaseException:
            os.close(lock)
            raise
        self._in_use.append(lock)
        return path

    def _try_hold(
        self, name: str, lock: int, nbytes: int, fill: Callable[[BinaryIO], None]
    ) -> bool:
        """Lock the file for use, and fill it first if nobody else does; False to try again.

        Each try looks for the file anew: another process may have filled it and use it for days,
        with a lock that is never free for us. A lock that cannot be changed into another is lost.
        """
        if not _try_lock(lock, fcntl.LOCK_SH):
            return False
        if self.has(name):
            return True
        if not _try_lock(lock, fcntl.LOCK_EX):
            return False
        if not self.has(name):
            self._fill(name, nbytes, fill)
        # Between both locks another process may delete it again.
        return _try_lock(lock, fcntl.LOCK_SH) and self.has(name)

    def _fill(self, name: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> None:
        if not self._has_free(nbytes):
            raise OccupiedError(
                f"no room for {nbytes:,} bytes of {Path(name).name} in {self._folder}: a twentieth "
                "of the disk stays free; make room on this node"
            )
        self._reserve(nbytes)
        with self._draft(name) as file:
            fill(file)
            # It is mapped and not read through, so no checksum would find it cut.
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _draft(self, name: str) -> Iterator[BinaryIO]:
        """A new file that gets its name when it is whole."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_DRAFT}")
        try:
            with draft.open("wb") as file:
                yield file
            draft.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    def _has_free(self, nbytes: int) -> bool:
        """Whether the disk has room for `nbytes`, and a share of it stays free."""
        self._folder.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(self._folder)
        left = disk.f_bavail * disk.f_frsize - nbytes
        return left >= disk.f_blocks * disk.f_frsize // _FREE_SHARE

    def _reserve(self, nbytes: int) -> None:
        """Count `nbytes` as taken, at most the bound."""
        handle = os.open(self._folder / _USAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            raw = os.pread(handle, _NUMBER.size, 0)
            used = _NUMBER.unpack(raw)[0] if len(raw) == _NUMBER.size else None
            if used is None or used + nbytes > self.max_bytes:
                used = self._make_room(nbytes)
            os.pwrite(handle, _NUMBER.pack(used + nbytes), 0)
        finally:
            os.close(handle)

    def _make_room(self, nbytes: int) -> int:
        """Count what is there and delete what must go; says how many bytes are left."""
        kept, fixed = self._found()
        used = sum(each.nbytes for each in kept)
        if used + fixed + nbytes <= self.max_bytes:
            return used + fixed
        limit = self.max_bytes - self.max_bytes // _FREED_SHARE - fixed - nbytes
        for each in to_evict(kept, limit_bytes=limit):
            if _unlink(each.name):
                used -= each.nbytes
        return used + fixed

    def _found(self) -> tuple[list[KeptFile], int]:
        """What may be evicted, and the bytes of what is in use or being written."""
        found, fixed, in_use = [], 0, set()
        old_s = time.time() - _DRAFT_AGE_S
        for folder in os.scandir(self._folder):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                try:
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_DRAFT) and stat.st_mtime < old_s:
                        os.unlink(entry.path)
                        continue
                except FileNotFoundError:
                    # It was renamed or deleted meanwhile.
                    continue
                if entry.name.endswith(_LOCK):
                    if _is_locked(entry.path):
                        in_use.add(entry.path.removesuffix(_LOCK))
                elif entry.name.endswith(_DRAFT):
                    fixed += stat.st_size
                else:
                    found.append(
                        KeptFile(name=entry.path, nbytes=stat.st_size, used_at_ns=stat.st_mtime_ns)
                    )
        fixed += sum(each.nbytes for each in found if each.name in in_use)
        return [each for each in found if each.name not in in_use], fixed

    def _warn(self, kind: str, reason: str) -> None:
        """Log that blocks are not kept, once for each kind of reason."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("remote data is read without its cache: %s", reason)


def _try_lock(handle: int, kind: int) -> bool:
    """Take a lock, in the place of another that this handle has; False leaves it none."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(handle, fcntl.LOCK_UN)
        return False
    return True


def _is_locked(path: str) -> bool:
    """Whether any process uses or fills the file that a lock is for."""
    with _tried(path) as is_free:
        return not is_free


def _unlink(path: str) -> bool:
    """Delete a file, unless a process has begun to use it.

    Processes that have a block open can still read it; the last close frees its room.
    """
    with _tried(f"{path}{_LOCK}") as is_free:
        if is_free:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return is_free


@contextlib.contextmanager
def _tried(path: str) -> Iterator[bool]:
    """Hold a lock, if it is free. Blocks have none, and theirs is."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _try_lock(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)
