"""The code of jobs on this node: fetched from the controller, and unpacked once for each job.

A folder is there whole or not at all, and all ranks of the node share it, in every attempt: what
ranks write there stays until the job is over. It goes with the job's host memory.

A start may be given up, and a job may be over, at any moment; a thread cannot be. So an archive is
a file without a name, a draft belongs to the thread that unpacks, and what is deleted is renamed
first: that thread then finds no folder to go on in, nor one to put in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import grpc
import grpc.aio

from controller.agent.addresses import Controllers
from controller.agent.config import AgentConfig
from controller.agent.threads import HungCallsError, run_blocking
from controller.agent.workers.launch import StartRefusedError
from outlast.channel import open_aio_channel
from outlast.code.digest import file_name
from outlast.code.errors import CodeError
from outlast.code.unpack import check_digest, unpack
from outlast.failures import ErrorKind
from outlast.v1 import code_pb2
from outlast.v1.code_pb2_grpc import CodeStub

if TYPE_CHECKING:
    from outlast.v1.code_pb2_grpc import CodeAsyncStub

logger = logging.getLogger(__name__)

_DRAFT = ".draft-"
_GONE = ".gone-"
# Between two tries, while the controller is away.
_PAUSE_S = 1.0
# A controller sends something every 10 s while others have their turn. One that does not may be
# frozen, and the agent have turned to another one.
_SILENCE_S = 25.0
# A controller sends for 600 s at most, and lets 32 nodes fetch at once: three turns before ours.
_FETCH_S = 2400.0
# Of the largest archive, 4 GiB, to a disk that takes 10 MB/s.
_UNPACK_S = 600.0
# What another try may change: a controller that restarts, a connection that breaks.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
# What no other node could change either: the controller has it no more, or not as it was.
_LOST = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS)
_CHANNEL_OPTIONS = (
    # A controller that vanishes without a word: as in `session`.
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.enable_retries", 0),
    # Beside the agent's own connection, whose heartbeats do not wait behind an archive.
    ("grpc.use_local_subchannel_pool", 1),
)


class _SilentError(Exception):
    """A controller sends nothing."""


class JobCode:
    """The folders of one agent."""

    def __init__(self, config: AgentConfig, controllers: Controllers) -> None:
        self._config = config
        self._controllers = controllers

    async def ready(self, job_id: str, digest: str) -> Path:
        """The folder with the code of a job, which is fetched if it is not here.

        Raises:
            StartRefusedError: it cannot be had.
        """
        folder = self._config.code_dir / job_id / file_name(digest)
        if folder.is_dir():
            return folder
        try:
            archive = await run_blocking(lambda: _new_archive(folder.parent), "unpack")
            try:
                await self._fetch(digest, archive)
            except BaseException:
                _let_go(archive)
                raise
            async with asyncio.timeout(_UNPACK_S):
                await run_blocking(lambda: _unpack(archive, digest, folder), "unpack")
        except (OSError, HungCallsError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            if isinstance(error, TimeoutError):
                why = f"it took more than {_UNPACK_S:g} s"
            raise StartRefusedError(
                ErrorKind.RESOURCE,
                f"workload.code cannot be unpacked to {folder.parent}: {why}",
            ) from error
        except CodeError as error:
            # It is the same for every node: what came is what was sent to the controller.
            raise StartRefusedError(
                ErrorKind.CONFIG, f"workload.code {digest}: {error}; submit the job again"
            ) from error
        logger.info("code unpacked: job=%s %s at %s", job_id, digest, folder)
        return folder

    async def _fetch(self, digest: str, into: IO[bytes]) -> None:
        """Fetch an archive, for as long as something comes.

        Raises:
            CodeError: it came, and is not the one of this digest.
            StartRefusedError: it did not come.
        """
        silence_s = self._config.limits.code_s
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _FETCH_S
        try:
            async with asyncio.timeout(silence_s) as limit:

                def heard() -> None:
                    limit.reschedule(min(loop.time() + silence_s, end_s))

                while (passing := await self._try(digest, into, heard)) is not None:
                    logger.warning("code not fetched, tried again: %s %s", digest, passing)
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            raise StartRefusedError(
                ErrorKind.RESOURCE,
                f"workload.code {digest}: the controller sent nothing of it for {silence_s:g} s, "
                f"or not all of it in {_FETCH_S:g} s",
            ) from error

    async def _try(self, digest: str, into: IO[bytes], heard: Callable[[], None]) -> str | None:
        """Fetch an archive; why it did not come, where another try may bring it."""
        found = hashlib.sha256()

        def write(data: bytes) -> None:
            found.update(data)
            into.write(data)

        await run_blocking(lambda: _empty(into), "write code")
        try:
            async with contextlib.aclosing(self._chunks(digest)) as chunks:
                while (data := await self._next(chunks)) is not None:
                    heard()
                    await run_blocking(partial(write, data), "write code")
        except _SilentError:
            return f"nothing came in {_SILENCE_S:g} s"
        except grpc.aio.AioRpcError as error:
            if error.code() in _PASSING:
                return f"{error.code().name}: {error.details()}"
            raise StartRefusedError(
                ErrorKind.CONFIG if error.code() in _LOST else ErrorKind.RESOURCE,
                f"workload.code {digest}: {error.details()} ({error.code().name})",
            ) from error
        if f"sha256:{found.hexdigest()}" != digest:
            raise CodeError(f"what the controller has of it is sha256:{found.hexdigest()}")
        return None

    async def _next(self, chunks: AsyncGenerator[bytes, None]) -> bytes | None:
        """What comes next of an archive; None at its end."""
        try:
            async with asyncio.timeout(_SILENCE_S):
                return await anext(chunks, None)
        except TimeoutError as error:
            raise _SilentError from error

    async def _chunks(self, digest: str) -> AsyncGenerator[bytes, None]:
        """What comes of an archive; nothing at times, while it waits for its turn."""
        way = await self._controllers.way(self._controllers.address())
        async with open_aio_channel(way.address, way.access, _CHANNEL_OPTIONS) as channel:
            stub = cast("CodeAsyncStub", CodeStub(channel))
            request = code_pb2.GetCodeRequest(digest=digest)
            async for response in stub.GetCode(request, metadata=way.metadata):
                yield response.data


def delete_code(code_dir: Path, job_id: str) -> None:
    """Delete what a job has here: it is over."""
    _delete(code_dir / job_id)


def delete_left_code(code_dir: Path, memory_dir: Path, *, older_than_s: float) -> None:
    """Delete what is here of jobs without host memory: they were forgotten, perhaps by an earlier
    agent that ended as it did so. A start makes the code's folder first; that is younger."""
    for folder in code_dir.iterdir() if code_dir.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            is_young = folder.stat().st_mtime >= older_than_s
            if not is_young and not (memory_dir / folder.name).is_dir():
                _delete(folder)


def _delete(folder: Path) -> None:
    gone = folder.with_name(f"{_GONE}{secrets.token_hex(8)}")
    try:
        folder.rename(gone)
    except OSError:
        # It is not there, or `delete_left_code` tries again.
        return
    shutil.rmtree(gone, ignore_errors=True)


def _new_archive(folder: Path) -> IO[bytes]:
    """A file without a name on the disk of a folder: it is gone when nobody has it open."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


def _let_go(archive: IO[bytes]) -> None:
    """Close it, not here: a thread may be writing to it, and its disk may hang."""
    # Without a thread it is closed when the last one that has it ends.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=archive.close, name="close code", daemon=True).start()


def _empty(archive: IO[bytes]) -> None:
    """For another try."""
    archive.seek(0)
    archive.truncate()


def _unpack(archive: IO[bytes], digest: str, folder: Path) -> None:
    """Unpack an archive, which is closed then, to where it is found."""
    draft = folder.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
    with archive:
        try:
            check_digest(archive, digest)
        except CodeError as error:
            # It came whole.
            raise OSError(f"the disk of this node changed it: {error}") from error
        unpack(archive, draft)
    try:
        draft.rename(folder)
    except OSError:
        # An older start of the job, which a stop has overtaken, was faster.
        if not folder.is_dir():
            raise
        shutil.rmtree(draft, ignore_errors=True)
    handle = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
