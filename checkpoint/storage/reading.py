"""Files of any fsspec URL that are only read: ranges, and which version of a file there is.

Calls have deadlines, as those for checkpoints do. What is kept of what was read, and how often a
failure is tried again, does not belong here.
"""

from __future__ import annotations

from checkpoint.storage.backend import FileVersion
from checkpoint.storage.storage import Storage


class FileStore(Storage):
    """A folder at a URL.

    Raises:
        StorageUnavailableError: there is no such kind of store here.
    """

    called = "storage"

    def __init__(self, url: str, *, deadline_s: float) -> None:
        # Nothing is written, so any store will do.
        super().__init__(url, single_writer=True, deadline_s=deadline_s)

    def version(self, path: str) -> FileVersion:
        """What a file is now; FileNotFoundError when there is none."""
        return self._call("look up", path, lambda: self._backend.version(path))
