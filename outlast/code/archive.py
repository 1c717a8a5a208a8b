"""A folder of code as one archive whose bytes depend on nothing but the code.

A tar file: names in order, no times, no owners, of the modes only whether a file is executable.
Its SHA-256 names it, so that what was sent once is not sent again, and a job whose record has the
digest runs the same code months later.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from outlast.code.digest import DEFAULT_MAX_BYTES, digest_of
from outlast.code.errors import CodeError
from outlast.code.listing import Entry, entries_of

# Enough to see what does not belong there.
_NUM_LARGEST = 3
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive in a file that is gone when it is closed. Use it in a `with` block."""

    digest: str
    """sha256: and 64 hexadecimal digits."""
    size_bytes: int
    names: frozenset[str]
    """Of the files and links in it."""
    file: IO[bytes]
    """From its beginning."""

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.close()


def pack(root: Path, exclude: Sequence[str] = (), max_bytes: int = DEFAULT_MAX_BYTES) -> Archive:
    """The archive of a folder's code.

    Raises:
        CodeError: it is larger than `max_bytes`, or has what cannot be sent.
    """
    entries = entries_of(root, exclude)
    check_size(root, entries, max_bytes)
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the archive's, which closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for entry in entries:
                _add(tar, entry)
        size_bytes = file.tell()
        file.seek(0)
        digest = digest_of(file)
        file.seek(0)
    except OSError as error:
        file.close()
        raise CodeError(f"{root} cannot be packed: {error}") from error
    except BaseException:
        file.close()
        raise
    names = frozenset(entry.name for entry in entries)
    return Archive(digest=digest, size_bytes=size_bytes, names=names, file=file)


def check_size(root: Path, entries: Sequence[Entry], max_bytes: int) -> None:
    """Refuse what is too large before it is read.

    Raises:
        CodeError: naming its size, the limit and the largest files.
    """
    size_bytes = sum(_size_in_tar(entry) for entry in entries)
    if size_bytes <= max_bytes:
        return
    largest = sorted(entries, key=lambda entry: entry.size_bytes, reverse=True)[:_NUM_LARGEST]
    named = ", ".join(f"{entry.name} ({_in_mib(entry.size_bytes)})" for entry in largest)
    raise CodeError(
        f"{root} has {_in_mib(size_bytes)} in {len(entries):,} files; allowed: at most "
        f"{_in_mib(max_bytes)} (code.max_mib of the controller's configuration); the largest: "
        f"{named}; leave out what is no code, with .gitignore or workload.code.exclude"
    )


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.mode = 0o755 if entry.is_executable else 0o644
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
        tar.addfile(info)
        return
    info.size = entry.size_bytes
    with entry.path.open("rb") as file:
        try:
            tar.addfile(info, file)
        except OSError as error:
            raise CodeError(f"{entry.name} cannot be read, or has changed: {error}") from error


def _size_in_tar(entry: Entry) -> int:
    """A header, and the content in whole blocks."""
    block = tarfile.BLOCKSIZE
    return block + -(-entry.size_bytes // block) * block


def _in_mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB"
