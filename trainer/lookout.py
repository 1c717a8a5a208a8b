"""A job's storage, opened and listed while groups and model are made.

Loading a store's client and its first answers take a second that a start need not
wait for.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from checkpoint.peers import outcome
from checkpoint.storage import Storage

# The storage and its committed steps, newest first; or what went wrong with either.
Look = tuple[Storage | Exception, list[int] | Exception]


class Lookout:
    """One rank's look at `url`. Only a rank that `lists` asks for the committed steps."""

    def __init__(self, url: str, *, lists: bool) -> None:
        self._url = url
        self._lists = lists
        self._looking: Future[Look] | None = None

    def begin(self) -> None:
        """Look in the background."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-look")
        self._looking = pool.submit(self._look)
        # The thread goes once its look has ended.
        pool.shutdown(wait=False)

    def take(self) -> Look:
        """What was seen, at once or when it is."""
        return self._look() if self._looking is None else self._looking.result()

    def _look(self) -> Look:
        storage = outcome(lambda: Storage(self._url))
        if isinstance(storage, Exception):
            return storage, storage
        return storage, outcome(storage.committed_steps) if self._lists else []
