"""The processes that read data for the ranks of attempts on this node.

Each is a program of its own (`trainer.worker.data_loader`), forked by the standby process. Here is
the socket at which it answers: ranks that connect while there is no process wait in it for the next
one. Whether there will be one `core/loaders` decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.agent.core.reports import AttemptKey
from controller.agent.files import last_words
from controller.agent.workers.processes import how_ended
from controller.agent.workers.programs import Standby, Started, start_child
from outlast import local_socket, private

logger = logging.getLogger(__name__)

_PROGRAM = "trainer.worker.data_loader"
_SOCKET, _SPEC, _LOG = "data-loader.sock", "data-loader.spec.json", "data-loader.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEvents:
    """What the rest of the agent wants to hear."""

    started: Callable[[AttemptKey], None]
    ended: Callable[[AttemptKey, str], None]
    """It has ended without being stopped, or could not be started; with the reason."""
    changed: Callable[[], None]
    """There is a new process below the agent."""


@dataclass(slots=True, kw_only=True)
class _Loader:
    folder: Path
    listening: socket.socket
    program: Started | None = None
    # Starts the process, and waits for its end.
    task: asyncio.Task[None] | None = None


class DataLoaders:
    """One process for each attempt whose ranks share what they read."""

    def __init__(self, standby: Standby, data_dir: Path, events: LoaderEvents) -> None:
        self._standby = standby
        self._data_dir = data_dir
        self._events = events
        self._loaders: dict[AttemptKey, _Loader] = {}
        # Those that are being ended; their processes are known until they are gone.
        self._ends: dict[asyncio.Task[None], _Loader] = {}

    def pids(self) -> Iterator[int]:
        """Of the processes that run."""
        for loader in (*self._loaders.values(), *self._ends.values()):
            if loader.program is not None:
                yield loader.program.pid

    def prepare(self, key: AttemptKey, folder: Path, spec_json: str) -> Path:
        """Let ranks of an attempt connect from now on; where. `folder` is the attempt's.

        Raises:
            OSError: there cannot be a socket.
        """
        # Of starts that failed before their ranks were there, too.
        self.end_of(key.job_id)
        path = folder / _SOCKET
        private.write_text(folder / _SPEC, spec_json)
        self._loaders[key] = _Loader(folder=folder, listening=local_socket.listen(path))
        return path

    def start(self, key: AttemptKey) -> None:
        """Start the process."""
        loader = self._loaders.get(key)
        if loader is not None:
            work = self._run(key, loader)
            loader.task = asyncio.create_task(work, name=f"data-loader-{key.job_id}")

    def stop(self, key: AttemptKey) -> None:
        """End the process, if there is one; ranks that still connect are refused."""
        loader = self._loaders.pop(key, None)
        if loader is not None:
            end = asyncio.create_task(_end(loader), name=f"data-loader-end-{key.job_id}")
            self._ends[end] = loader
            end.add_done_callback(self._ends.pop)

    def end_of(self, job_id: str) -> None:
        """Stop whatever is there for a job."""
        for key in [key for key in self._loaders if key.job_id == job_id]:
            self.stop(key)

    async def close(self) -> None:
        """End all of them."""
        for key in list(self._loaders):
            self.stop(key)
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def _run(self, key: AttemptKey, loader: _Loader) -> None:
        log_path = loader.folder / _LOG
        try:
            log_begin = log_path.stat().st_size if log_path.exists() else 0
            loader.program = await self._start(loader, log_path)
        except OSError as error:
            self._events.ended(key, f"it cannot be started: {error}")
            return
        logger.info("data loader started: job=%s attempt=%d pid=%d", *key, loader.program.pid)
        self._events.changed()
        self._events.started(key)
        code = await loader.program.ended()
        pid, loader.program = loader.program.pid, None
        reason = f"{how_ended(code)}{last_words(log_path, log_begin)}"
        logger.warning("data loader ended: job=%s attempt=%d pid=%d %s", *key, pid, reason)
        self._events.ended(key, reason)

    async def _start(self, loader: _Loader, log_path: Path) -> Started:
        # Nothing is awaited between the start and the return.
        with private.open_to_append(log_path) as log:
            streams = (loader.listening.fileno(), log.fileno(), log.fileno())
            arguments = (
                *("--spec", str(loader.folder / _SPEC)),
                *("--data-dir", str(self._data_dir)),
                *("--parent", str(os.getpid())),
            )
            child = await start_child(self._standby, _PROGRAM, arguments, streams)
        return Started(child=child)


async def _end(loader: _Loader) -> None:
    loader.listening.close()
    (loader.folder / _SOCKET).unlink(missing_ok=True)
    if loader.task is not None:
        loader.task.cancel()
        await asyncio.gather(loader.task, return_exceptions=True)
    if loader.program is not None:
        await loader.program.kill()
