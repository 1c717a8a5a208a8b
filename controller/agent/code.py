"""The code of jobs on this node: fetched from the controller, and unpacked once for each job.

A folder is there whole or not at all, and all ranks of the node share it, in every attempt: what
ranks write there stays until the job is over. It goes with the job's host memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from controller import join_token
from controller.agent.addresses import controller_address
from controller.agent.config import AgentConfig
from controller.agent.threads import run_blocking
from controller.agent.workers.launch import StartRefusedError
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
# Between two tries, while the controller is away.
_PAUSE_S = 1.0
# What another try may change: a controller that restarts, a connection that breaks.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class JobCode:
    """The folders of one agent."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config

    async def ready(self, job_id: str, digest: str) -> Path:
        """The folder with the code of a job, which is fetched if it is not here.

        Raises:
            StartRefusedError: it cannot be had.
        """
        folder = self._config.code_dir / job_id / file_name(digest)
        if folder.is_dir():
            return folder
        draft = folder.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
        archive = draft.with_name(f"{draft.name}.tar")
        try:
            draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._fetch(digest, archive)
            await run_blocking(lambda: _unpack(archive, digest, draft, folder), "unpack")
        except OSError as error:
            raise StartRefusedError(
                ErrorKind.RESOURCE,
                f"workload.code cannot be unpacked to {folder.parent}: {error.strerror or error}",
            ) from error
        except CodeError as error:
            # It is the same for every node: what came is what the controller has.
            raise StartRefusedError(
                ErrorKind.CONFIG,
                f"workload.code as the controller has it is damaged: {error}; submit the job again",
            ) from error
        finally:
            archive.unlink(missing_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
        logger.info("code unpacked: job=%s %s at %s", job_id, digest, folder)
        return folder

    async def _fetch(self, digest: str, into: Path) -> None:
        limit_s = self._config.limits.code_s
        try:
            async with asyncio.timeout(limit_s):
                while (passing := await self._try(digest, into)) is not None:
                    logger.warning("code not fetched, tried again: %s %s", digest, passing)
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            raise StartRefusedError(
                ErrorKind.RESOURCE,
                f"workload.code {digest}: the controller did not send it in {limit_s:g} s",
            ) from error

    async def _try(self, digest: str, into: Path) -> str | None:
        """Fetch an archive; why it did not come, where another try may bring it."""
        config = self._config
        address = controller_address(config)
        try:
            token = join_token.metadata(config.join_token_file)
            async with grpc.aio.insecure_channel(address) as channel:
                stub = cast("CodeAsyncStub", CodeStub(channel))
                call = stub.GetCode(code_pb2.GetCodeRequest(digest=digest), metadata=token)
                with into.open("wb") as file:
                    async for response in call:
                        await run_blocking(_writing(file.write, response.data), "write code")
        except grpc.aio.AioRpcError as error:
            if error.code() in _PASSING:
                return f"{error.code().name}: {error.details()}"
            is_gone = error.code() is grpc.StatusCode.NOT_FOUND
            raise StartRefusedError(
                ErrorKind.CONFIG if is_gone else ErrorKind.RESOURCE,
                f"workload.code {digest}: {error.details()} ({error.code().name})",
            ) from error
        return None


def delete_code(code_dir: Path, job_id: str) -> None:
    """Delete what a job has here: it is over."""
    shutil.rmtree(code_dir / job_id, ignore_errors=True)


def delete_left_code(code_dir: Path, memory_dir: Path, *, older_than_s: float) -> None:
    """Delete what is here of jobs without host memory: they were forgotten, perhaps by an earlier
    agent that ended as it did so. A start makes the code's folder first; that is younger."""
    for folder in code_dir.iterdir() if code_dir.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            is_young = folder.stat().st_mtime >= older_than_s
            if not is_young and not (memory_dir / folder.name).is_dir():
                shutil.rmtree(folder, ignore_errors=True)


def _unpack(archive: Path, digest: str, draft: Path, folder: Path) -> None:
    check_digest(archive, digest)
    unpack(archive, draft)
    try:
        draft.rename(folder)
    except OSError:
        # An older start of the job, which a stop has overtaken, was faster.
        if not folder.is_dir():
            raise
    handle = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _writing(write: Callable[[bytes], int], data: bytes) -> Callable[[], int]:
    return lambda: write(data)
