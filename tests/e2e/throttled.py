"""A process that is slow for want of a core."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def throttled(pid: int, *, runs_s: float = 0.02, stands_s: float = 0.08) -> Iterator[None]:
    """The process runs and stands still in turns, as under a CPU quota. By default it has a fifth
    of the time: less than others get on a busy machine."""
    ends = threading.Event()

    def throttle() -> None:
        while not ends.wait(runs_s):
            os.kill(pid, signal.SIGSTOP)
            ends.wait(stands_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
