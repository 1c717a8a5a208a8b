"""Files that nobody but their owner may read: logs, reports and notes of a node.

The rights come with the file, not from the process's umask, which also decides about what
belongs to users (their checkpoints).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO


def open_to_append(path: Path) -> IO[bytes]:
    """A file to write at its end, made if it is not there."""
    return open(path, "ab", opener=_owners_only)


def write_text(path: Path, text: str) -> None:
    """Write a file anew."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file anew."""
    with open(path, "wb", opener=_owners_only) as file:
        file.write(data)


def replace_text(path: Path, text: str) -> None:
    """Write a file anew; who reads it meanwhile finds the old one or the new one, whole."""
    draft = path.with_name(f"{path.name}.tmp")
    write_text(draft, text)
    draft.replace(path)


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file anew, whole, for whoever could read the one that was there: a service's
    file that root replaces stays the service's. A new one is its maker's only.

    Raises:
        OSError: it cannot be written, or not be given to that owner.
    """
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        write_bytes(draft, data)
        if path.exists():
            before = path.stat()
            os.chown(draft, before.st_uid, before.st_gid)
            os.chmod(draft, stat.S_IMODE(before.st_mode))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _owners_only(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        # One that an earlier version made has other rights.
        os.fchmod(handle, 0o600)
    except OSError:
        os.close(handle)
        raise
    return handle
