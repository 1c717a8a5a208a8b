"""Creating a file only if absent on HDFS, through WebHDFS or through hdfs-native.

HDFS refuses to rename onto a file that exists, and a rename is atomic, content and
all. (Creating without overwriting is atomic in the name only: the loser of a race could
read a record that the winner has not finished.) What has to be looked at is the answer:
fsspec's `mv` for WebHDFS drops HDFS's `{"boolean": false}`, so that a rename that did
nothing looks like one that worked.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from checkpoint.core.names import draft_name


def has_rename(fs: Any) -> bool:
    """Whether this is an HDFS client whose renames we know how to check."""
    return _is_web(fs) or _is_native(fs)


def create_by_rename(fs: Any, path: str, data: bytes) -> bool:
    """Create `path` unless it exists; says whether this call made it.

    Raises:
        OSError: HDFS says neither that it was made nor that it exists.
    """
    if fs.exists(path):
        return False
    folder, _, name = path.rpartition("/")
    draft = f"{folder}/{draft_name(name, uuid.uuid4().hex)}"
    try:
        fs.pipe_file(draft, data)
        if _rename(fs, draft, path):
            if not fs.exists(path):
                raise OSError(f"renaming {draft} to {path} was said to work, but did nothing")
            return True
        if fs.exists(path):
            return False
        raise OSError(f"renaming {draft} to {path} was refused, though nothing is there")
    finally:
        with contextlib.suppress(FileNotFoundError):
            if fs.exists(draft):
                fs.rm_file(draft)


def _rename(fs: Any, source: str, target: str) -> bool:
    if _is_web(fs):
        answer = fs._call("RENAME", method="put", path=source, destination=target)
        return answer.json().get("boolean") is True
    try:
        fs.client.rename(source, target, False)
    except Exception:
        # It has its own kinds of errors; what counts is whether somebody was first.
        if fs.exists(target):
            return False
        raise
    return True


def _is_web(fs: Any) -> bool:
    return "webhdfs" in fs.protocol and hasattr(fs, "_call")


def _is_native(fs: Any) -> bool:
    return fs.protocol in ("hdfs", "viewfs") and hasattr(fs, "client")
