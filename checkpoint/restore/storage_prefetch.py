"""A job's storage, opened, listed and its newest manifest read while groups and model are made.

Loading a store's client and its first answers take a second that a start need not
wait for.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from checkpoint.core.manifest import Manifest
from checkpoint.restore.peers import outcome
from checkpoint.restore.restore import read_manifest
from checkpoint.storage.storage import Storage


class Look(NamedTuple):
    """What was seen, or what went wrong with it.

    `steps` are those of committed checkpoints, newest first; `newest` is the manifest of the
    first of them.
    """

    storage: Storage | Exception
    steps: list[int] | Exception
    newest: Manifest | Exception | None = None

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed step, which may have been read already.

        Raises:
            CorruptCheckpointError, StorageUnavailableError: as `read_manifest` does.
        """
        if isinstance(self.steps, list) and self.steps[:1] == [step]:
            if isinstance(self.newest, Exception):
                raise self.newest
            if self.newest is not None:
                return self.newest
        assert isinstance(self.storage, Storage), "or there would be no step to ask for"
        return read_manifest(self.storage, step)


class StoragePrefetch:
    """One rank's look at `url`. Only a rank that `lists` asks what is there."""

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
        """What was seen, at once or when it is. Another call looks anew."""
        looking, self._looking = self._looking, None
        return self._look() if looking is None else looking.result()

    def _look(self) -> Look:
        storage = outcome(lambda: Storage(self._url))
        if isinstance(storage, Exception):
            return Look(storage, storage)
        steps = outcome(storage.committed_steps) if self._lists else []
        if isinstance(steps, Exception) or not steps:
            return Look(storage, steps)
        return Look(storage, steps, outcome(partial(read_manifest, storage, steps[0])))
