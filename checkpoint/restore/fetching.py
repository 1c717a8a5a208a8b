"""Lets a rank wait until its host memory is filled from another node.

The agent fetches while workers fork and form groups. What says that it is at it is a lock
on a file beside the slots, which dies with its holder.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from outlast.errors import RetryableError

_FILE = "fetching"
_POLL_S = 0.005


class Fetching:
    """A rank's host memory is being filled, until `end`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A worker of an earlier attempt, which is being killed, may hold it for a moment.
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        except OSError:
            self.end()
            raise

    def end(self) -> None:
        """Let the rank look at what there is; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def await_fetched(folder: Path, timeout_s: float) -> None:
    """Return once nothing is being fetched into `folder`.

    Raises:
        RetryableError: it is, after so long.
    """
    try:
        handle = os.open(folder / _FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise RetryableError(
                        f"host memory {folder} is still being fetched from another node "
                        f"after {timeout_s:g} s"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return
    finally:
        os.close(handle)
