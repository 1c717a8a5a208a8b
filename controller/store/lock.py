"""One controller per state directory: a file lock held for life.

The kernel drops it with the process, so a killed controller leaves nothing to
clean up. The file says who holds it, for the message to the second one.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from outlast.errors import FatalError


class LockedError(FatalError):
    """Another controller uses the state directory."""


class StateLock:
    """The lock of a state directory; released by `close` or the end of the process."""

    def __init__(self, state_dir: Path) -> None:
        """Take the lock.

        Raises:
            LockedError: naming who holds it.
        """
        self._fd = _locked(state_dir)
        self.say()

    def say(self, *, grpc: str = "", http: str = "") -> None:
        """Write who holds the lock and where it listens."""
        text = json.dumps({"pid": os.getpid(), "grpc": grpc, "http": http}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def close(self) -> None:
        os.close(self._fd)


def check_free(state_dir: Path) -> None:
    """Write nothing, and keep nothing.

    Raises:
        LockedError: somebody has the lock.
    """
    os.close(_locked(state_dir))


def _locked(state_dir: Path) -> int:
    fd = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _describe(os.pread(fd, 4096, 0))
        os.close(fd)
        raise LockedError(
            f"{state_dir}: another controller ({holder}) uses this state directory; "
            "stop it first, or give another --state-dir"
        ) from error
    return fd


def _describe(text: bytes) -> str:
    try:
        holder = json.loads(text)
        pid, address = holder["pid"], holder["grpc"]
    # The holder may be writing it just now.
    except (ValueError, KeyError, TypeError):
        return "it has not said which yet"
    return f"pid {pid}, {address or 'not listening yet'}"
