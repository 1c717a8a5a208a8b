"""A store in memory for tests, that can fail and change, and files that are read from it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from outlast.remote.disk import BlockFolder
from outlast.remote.files import RemoteFiles

BLOCK_BYTES = 1024
_numbers = itertools.count()


class Requests:
    """What was asked of the store, and what it answers with instead."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.failing: list[BaseException] = []
        """The next reads raise these."""

    def note(self, path: str) -> None:
        self.reads[path.rpartition("/")[2]] += 1
        if self.failing:
            raise self.failing.pop(0)


def upload(folder: Path) -> str:
    """The files of a folder, at a URL of their own."""
    url = f"memory://bucket-{next(_numbers)}/corpus"
    fs = fsspec.filesystem("memory")
    for path in folder.iterdir():
        fs.pipe_file(f"{url.removeprefix('memory:/')}/{path.name}", path.read_bytes())
    return url


def put(url: str, data: bytes) -> None:
    """Replace a file of the store."""
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), data)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """The requests to the store in memory."""
    requests, read = Requests(), MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, *given: Any, **options: Any) -> Any:
        requests.note(path)
        return read(self, path, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "cat_file", cat_file)
        yield requests


def files(
    folder: Path | None, *, max_bytes: int = 1 << 20, patience_s: float = 20.0
) -> RemoteFiles:
    """What one process of a node opens files with."""
    cache = None if folder is None else BlockFolder(folder, max_bytes=max_bytes)
    return RemoteFiles(cache, block_bytes=BLOCK_BYTES, patience_s=patience_s, deadline_s=10.0)


def wait_for(files: RemoteFiles) -> None:
    """Until what was prefetched is there, or has failed."""
    threads = files.fetchers.threads
    files.close()
    for thread in threads:
        thread.join(30)
