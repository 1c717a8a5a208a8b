"""Threads that fetch from storage side by side.

They are daemons, which the threads of `concurrent.futures` are not: a process whose storage hangs
must be able to end. They start at the first use: workers are forked with a single thread.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from checkpoint.core.pacing import backoff_s
from checkpoint.errors import StorageUnavailableError

# Enough that blocks of 256 KiB at 50 ms each make 80 MB/s, and as many as may hang in a store.
NUM_FETCHING = 16

_Result = TypeVar("_Result")


class Fetchers:
    """A fixed number of threads for whoever fetches."""

    def __init__(self, num_threads: int = NUM_FETCHING) -> None:
        self._num_threads = num_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Have `work` done by one of them, in the order of calls."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                future.set_exception(error)

        with self._lock:
            if len(self.threads) < self._num_threads:
                thread = threading.Thread(target=self._serve, name="data-fetch", daemon=True)
                thread.start()
                self.threads.append(thread)
        self._work.put(run)
        return future

    def close(self) -> None:
        """End the threads when they have done what was submitted before."""
        with self._lock:
            for _ in self.threads:
                self._work.put(None)
            self.threads = []

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def insist(work: Callable[[], _Result], *, patience_s: float) -> _Result:
    """What `work` gives; a failure that may pass is tried again for so long.

    Raises:
        StorageUnavailableError: it did not pass, or will not.
    """
    began_s = time.monotonic()
    for num_failures in count(1):
        try:
            return work()
        except StorageUnavailableError as error:
            wait_s = backoff_s(num_failures, random.random())
            asked_s = time.monotonic() - began_s
            if error.lasting or asked_s + wait_s > patience_s:
                if num_failures == 1:
                    raise
                raise StorageUnavailableError(
                    f"{error}; asked {num_failures} times in {asked_s:.0f} s", lasting=error.lasting
                ) from error
        time.sleep(wait_s)
    raise AssertionError("counting does not end")
