"""torch.distributed.checkpoint at its best: buffers that are kept from save to save.

As shipped, every `async_save` allocates and faults in a new copy of the state.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

Mode = Literal["thread", "process"]

# It warns at every save of a state that is not sharded.
warnings.filterwarnings("ignore", module="torch.distributed")
logging.getLogger("torch.distributed").setLevel(logging.ERROR)


class AsyncSaver:
    """Saves below `folder` with `async_save`; keeps the newest only."""

    def __init__(self, state: dict[str, Any], folder: Path, mode: Mode) -> None:
        self._state = state
        self._folder = folder
        shares = mode == "process"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shares,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._type = AsyncCheckpointerType.PROCESS if shares else AsyncCheckpointerType.THREAD
        self._number = 0
        self._saving: Future[Any] | None = None

    def save(self) -> float:
        """Seconds until the state may change again."""
        self._number += 1
        begin_s = time.perf_counter()
        saving = async_save(
            self._state,
            checkpoint_id=self._folder / str(self._number),
            async_stager=self._stager,
            async_checkpointer_type=self._type,
        )
        took_s = time.perf_counter() - begin_s
        assert isinstance(saving, Future), "staging is not asynchronous"
        self._saving = saving
        return took_s

    @property
    def is_durable(self) -> bool:
        """Whether what was saved last is on disk."""
        return self._saving is None or self._saving.done()

    def settle(self) -> None:
        """Wait until it is, and delete it."""
        if self._saving is not None:
            self._saving.result()
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)

    def close(self) -> None:
        self._stager.close()


def save_all(state: dict[str, Any], url: str) -> None:
    """Save the state of one rank to a store."""
    save(state, storage_writer=FsspecWriter(url), no_dist=True)


def load_all(state: dict[str, Any], url: str) -> None:
    """Fill the tensors of `state`; all ranks call it together."""
    load(state, storage_reader=FsspecReader(url))
