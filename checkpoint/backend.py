"""What a store must be able to do, and the store we implement ourselves: a folder.

A folder gets more care than fsspec's local file system takes: files appear under
their name only when they are whole and flushed, and creating a record fails when
it exists already, whoever else is creating it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Hard links are missing on some FUSE and FAT file systems.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder of a store. `written_at_s` is None where the store does not say."""

    name: str
    is_folder: bool
    nbytes: int
    written_at_s: float | None


class FileWriter(Protocol):
    """A file being written. It does not exist before `finish`."""

    def write(self, chunk: memoryview) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Backend(Protocol):
    """A store. Paths are relative to its root; missing files raise FileNotFoundError."""

    def read(self, path: str, start: int | None, end: int | None) -> bytes: ...

    def size(self, path: str) -> int: ...

    def writer(self, path: str) -> FileWriter: ...

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file unless it exists; says whether this call made it."""
        ...

    def entries(self, path: str) -> list[Entry]:
        """What a folder holds; nothing when it does not exist."""
        ...

    def delete_file(self, path: str) -> None: ...

    def delete_folder(self, path: str) -> None: ...


class LocalFolder:
    """A folder of this machine, or one that it mounts."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str, start: int | None, end: int | None) -> bytes:
        with (self._root / path).open("rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def writer(self, path: str) -> FileWriter:
        return _LocalWriter(self._root / path)

    def create(self, path: str, data: bytes) -> bool:
        final = self._root / path
        if final.exists():
            return False
        writer = _LocalWriter(final)
        try:
            writer.write(memoryview(data))
            return writer.finish_new()
        finally:
            writer.abort()

    def entries(self, path: str) -> list[Entry]:
        found = []
        try:
            with os.scandir(self._root / path) as listing:
                for item in listing:
                    # Files may vanish while we look: other attempts clean up too.
                    with contextlib.suppress(FileNotFoundError):
                        status = item.stat()
                        found.append(
                            Entry(
                                name=item.name,
                                is_folder=item.is_dir(),
                                nbytes=status.st_size,
                                written_at_s=status.st_mtime,
                            )
                        )
        except FileNotFoundError:
            return []
        return found

    def delete_file(self, path: str) -> None:
        file = self._root / path
        file.unlink()
        _flush_folder(file.parent)

    def delete_folder(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / path)


class _LocalWriter:
    """Writes beside the final name, so that a writer that hangs and wakes up touches nothing."""

    def __init__(self, final: Path) -> None:
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._temporary, flags, 0o644)

    def write(self, chunk: memoryview) -> None:
        while chunk:
            chunk = chunk[os.write(self._handle, chunk) :]
        # Flushed chunk by chunk: one flush of everything at the end would take longer than
        # any deadline for a single call, and fill the page cache that workers need.
        os.fdatasync(self._handle)
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        self._close()
        self._temporary.rename(self._final)
        _flush_folder(self._final.parent)

    def finish_new(self) -> bool:
        """Like finish, but leaves an existing file as it is; says whether there was none."""
        self._close()
        try:
            os.link(self._temporary, self._final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._copy_new()
        _flush_folder(self._final.parent)
        return True

    def abort(self) -> None:
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _copy_new(self) -> bool:
        # Not atomic in content: a crash in between leaves a record whose digest is wrong.
        try:
            with self._final.open("xb") as file:
                file.write(self._temporary.read_bytes())
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        _flush_folder(self._final.parent)
        return True

    def _close(self) -> None:
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
