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
from checkpoint.errors import StorageTimeoutError, StorageUnavailableError

# Blocks of 256 KiB at 50 ms each make 40 MB/s. Half of `checkpoint.storage.hung.MAX_HUNG_CALLS`:
# when all of them hang, each call can be tried a second time before no more are made.
NUM_FETCHING = 8

_Result = TypeVar("_Result")


class Fetchers:
    """A fixed number of threads that fetch from storage."""

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


def retry_for(work: Callable[[], _Result], *, patience_s: float) -> _Result:
    """The result of `work`; failures that may pass are tried again for `patience_s`.

    Raises:
        StorageUnavailableError: it did not pass, or will not. Never one of its subclasses: the rule
            for ranks that end with it matches this name (`diagnostics.core.rules.exits_peers`).
    """
    began_s = time.monotonic()
    for num_failures in count(1):
        try:
            return work()
        except StorageUnavailableError as error:
            # A store that hangs may answer again, also after too many calls hang at once.
            is_final = error.lasting and not isinstance(error, StorageTimeoutError)
            wait_s = backoff_s(num_failures, random.random())
            asked_s = time.monotonic() - began_s
            if is_final or asked_s + wait_s > patience_s:
                asked = f"; asked {num_failures} times in {asked_s:.0f} s"
                raise StorageUnavailableError(
                    f"{error}{asked if num_failures > 1 else ''}", lasting=is_final
                ) from error
        time.sleep(wait_s)
    raise AssertionError("counting does not end")
