"""A rank that is slow for want of a core."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """A process that stands still for three quarters of the time."""
    is_over = threading.Event()

    def take_turns() -> None:
        while not is_over.wait(0.01):
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(0.03)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
