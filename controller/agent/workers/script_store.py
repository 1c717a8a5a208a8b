"""The store at which the ranks of a script meet.

torchrun's agent hosts it for its ranks, and so does ours on the node of rank 0: a program of its
own for each attempt, on the listening socket that the agent keeps. So no attempt sees keys of an
earlier one, and a rank that connects before the store is up waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from pathlib import Path

from controller.agent.workers.programs import Standby, Started, start_child
from outlast import private
from outlast.errors import RetryableError

_PROGRAM = "trainer.worker.script_store"
# An interpreter that imports torch on a busy machine needs 10 s; a fork needs 20 ms.
_READY_S = 60.0


class StoreError(RetryableError):
    """There is no store for the ranks of a script to meet at."""


class ScriptStore:
    """The store of one attempt at a time."""

    def __init__(self, standby: Standby, *, rendezvous_fd: int, host: str, log_path: Path) -> None:
        """`host` is the address of this node, as ranks know it."""
        self._standby = standby
        self._rendezvous_fd = rendezvous_fd
        self._host = host
        self._log_path = log_path
        self._job_id = ""
        self._program: Started | None = None

    @property
    def pid(self) -> int | None:
        """Of its process, if there is one."""
        return None if self._program is None else self._program.pid

    async def start(self, job_id: str) -> None:
        """Host a store for an attempt of a job, an empty one.

        Raises:
            StoreError: it does not answer.
            OSError: it cannot be started.
        """
        await self.close()
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(private.open_to_append(self._log_path))
            reading, writing = os.pipe()
            reader = opened.enter_context(io.FileIO(reading, "rb"))
            with io.FileIO(writing, "wb") as said:
                streams = (self._rendezvous_fd, said.fileno(), log.fileno())
                arguments = ("--host", self._host, "--parent", str(os.getpid()))
                child = await start_child(self._standby, _PROGRAM, arguments, streams)
                # Known before anything is awaited: a child that nobody knows is killed as an
                # orphan's.
                self._job_id, self._program = job_id, Started(child=child)
            await self._wait_ready(reader)

    async def end_of(self, job_id: str) -> None:
        """End the store if it is this job's."""
        if self._job_id == job_id:
            await self.close()

    async def close(self) -> None:
        """End the store, if there is one."""
        program, self._job_id, self._program = self._program, "", None
        if program is not None:
            await program.kill()

    async def _wait_ready(self, reader: io.FileIO) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), reader
        )
        try:
            async with asyncio.timeout(_READY_S):
                is_ready = bool(await stream.readline())
        except TimeoutError:
            is_ready = False
        finally:
            transport.close()
        if not is_ready:
            await self.close()
            raise StoreError(
                f"the store at which the script's ranks meet did not start; see {self._log_path}"
            )
