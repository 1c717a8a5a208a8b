"""How a worker wakes its agent when it has sealed a slot, without waiting for anybody.

A named pipe beside the slots. The agent makes it and waits at it; a worker that finds no pipe,
or nobody at it, goes on: the agent looks now and then anyway.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from pathlib import Path

_FILE = "sealed"
_PIPE_BYTES = 4096


class Bell:
    """The worker's end of the pipe of one rank."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._handle = -1

    def ring(self) -> None:
        """Wake whoever waits."""
        try:
            if self._handle < 0:
                self._handle = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._handle, b"!")
        except BlockingIOError:
            # Full: it has been rung often enough.
            return
        except OSError:
            # Nobody is there; another agent may be later.
            self.close()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Doorkeeper:
    """The agent's end of the pipes of some ranks, whose folders may not be there yet."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._paths = [folder / _FILE for folder in folders]
        self._handles: dict[Path, int] = {}

    def wait(self, timeout_s: float) -> None:
        """Return when a bell has been rung since the last call, or after `timeout_s`."""
        for path in self._paths:
            if path not in self._handles:
                self._open(path)
        # Not select, which takes no descriptor above 1,023.
        bells = select.poll()
        for handle in self._handles.values():
            bells.register(handle, select.POLLIN)
        for handle, _ in bells.poll(timeout_s * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(handle, _PIPE_BYTES)

    def close(self) -> None:
        for handle in self._handles.values():
            # The kernel lets go of it, whatever it says.
            with contextlib.suppress(OSError):
                os.close(handle)
        self._handles.clear()

    def _open(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # For both: with a writer of our own it never comes to its end.
            self._handles[path] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
