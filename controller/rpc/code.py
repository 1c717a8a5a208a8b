"""The Code service: archives of what jobs run come from clients and go to agents.

An archive comes and goes in chunks, with bounds on how many do at once and on how long each may
take, so that a slow or vanished peer costs neither memory nor the others' turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from controller.grpc_errors import Context, abort, bad_field, not_found, unavailable
from controller.store.code import CodeStore, Draft, NoRoomError
from outlast.code.digest import CHUNK_BYTES
from outlast.code.errors import CodeError
from outlast.v1 import code_pb2
from outlast.v1.code_pb2_grpc import CodeServicer

# 64 MiB take 5 s at 100 Mbit/s. The clocks of others stand meanwhile.
MAX_UPLOADS = 4
MAX_DOWNLOADS = 32
CHUNK_TIMEOUT_S = 30.0
TRANSFER_TIMEOUT_S = 600.0
# Agents take a controller that says nothing for 120 s for one that does not answer.
TURN_S = 10.0
_SUBMIT_AGAIN = "submit the job again with its folder"

Check = Callable[[Context], Awaitable[None]]


class CodeService(CodeServicer):
    """Takes archives in and hands them out."""

    def __init__(
        self,
        store: CodeStore,
        check_agent: Check,
        *,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
        turn_s: float = TURN_S,
    ) -> None:
        """`check_agent` ends the call of an agent that may not join; one that waits for its turn
        hears so every `turn_s`."""
        self._store = store
        self._check_agent = check_agent
        self._chunk_timeout_s = chunk_timeout_s
        self._turn_s = turn_s
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._downloads = asyncio.Semaphore(MAX_DOWNLOADS)

    async def FindCode(
        self, request: code_pb2.FindCodeRequest, context: Context
    ) -> code_pb2.FindCodeResponse:
        """Whether an archive is here."""
        is_here = bool(request.digest) and await self._find(request.digest, context)
        return code_pb2.FindCodeResponse(is_here=is_here, max_bytes=self._store.max_bytes)

    async def PutCode(
        self, requests: AsyncIterator[code_pb2.PutCodeRequest], context: Context
    ) -> code_pb2.PutCodeResponse:
        """Take an archive in."""
        try:
            async with self._uploads, asyncio.timeout(TRANSFER_TIMEOUT_S):
                await self._take(requests, context)
        except TimeoutError:
            await abort(
                context,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "the archive did not come in time; send it again",
                reason="UPLOAD_TOO_SLOW",
            )
        except NoRoomError as error:
            await unavailable(context, error, reason="NO_ROOM")
        except CodeError as error:
            await bad_field(context, "archive", str(error))
        except OSError as error:
            await abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the controller cannot keep the archive: {error.strerror or error}",
                reason="NO_ROOM",
            )
        return code_pb2.PutCodeResponse()

    async def GetCode(  # type: ignore[override]  # its stub knows of handlers that yield only
        self, request: code_pb2.GetCodeRequest, context: Context
    ) -> None:
        """Send an archive; messages without data first, while others have their turn."""
        await self._check_agent(context)
        if not await self._find(request.digest, context):
            await not_found(context, "code", request.digest, _SUBMIT_AGAIN)
        try:
            async with self._turn(context), asyncio.timeout(TRANSFER_TIMEOUT_S):
                await self._send_all(request.digest, context)
        except TimeoutError:
            await abort(
                context,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "the archive was not taken in time; the network or this node's disk is slow",
                reason="DOWNLOAD_TOO_SLOW",
            )
        except (OSError, CodeError) as error:
            # So that it is sent anew with the next job.
            await asyncio.to_thread(self._store.delete_damaged, request.digest)
            await abort(
                context,
                grpc.StatusCode.DATA_LOSS,
                f"the controller's disk has it no more as it was sent: {error}; {_SUBMIT_AGAIN}",
                reason="CODE_DAMAGED",
            )

    @asynccontextmanager
    async def _turn(self, context: Context) -> AsyncIterator[None]:
        """One of the downloads that go at once; the agent hears of us until there is one."""
        while True:
            try:
                async with asyncio.timeout(self._turn_s):
                    await self._downloads.acquire()
                break
            except TimeoutError:
                await self._send(context, b"")
        try:
            yield
        finally:
            self._downloads.release()

    async def _send_all(self, digest: str, context: Context) -> None:
        """Send an archive.

        Raises:
            CodeError: it is not what was brought.
            OSError: it cannot be read.
            TimeoutError: a part of it was not taken in time.
        """
        found = hashlib.sha256()
        with await asyncio.to_thread(self._store.path_of(digest).open, "rb") as file:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await asyncio.to_thread(found.update, data)
                await self._send(context, data)
        if f"sha256:{found.hexdigest()}" != digest:
            raise CodeError(f"it is sha256:{found.hexdigest()} now")

    async def _send(self, context: Context, data: bytes) -> None:
        async with asyncio.timeout(self._chunk_timeout_s):
            await context.write(code_pb2.GetCodeResponse(data=data))

    async def _find(self, digest: str, context: Context) -> bool:
        try:
            return await asyncio.to_thread(self._store.find, digest)
        except ValueError as error:
            await bad_field(context, "digest", str(error))

    async def _take(
        self, requests: AsyncIterator[code_pb2.PutCodeRequest], context: Context
    ) -> None:
        first = await self._next(requests)
        if first is None:
            raise CodeError("nothing came")
        if await self._find(first.digest, context):
            return
        with await asyncio.to_thread(self._store.begin, first.digest, first.size_bytes) as draft:
            await self._write(draft, first)
            while (request := await self._next(requests)) is not None:
                await self._write(draft, request)
            await asyncio.to_thread(draft.finish)

    async def _next(
        self, requests: AsyncIterator[code_pb2.PutCodeRequest]
    ) -> code_pb2.PutCodeRequest | None:
        async with asyncio.timeout(self._chunk_timeout_s):
            return await anext(requests, None)

    async def _write(self, draft: Draft, request: code_pb2.PutCodeRequest) -> None:
        if len(request.data) > CHUNK_BYTES:
            raise CodeError(f"a chunk of {len(request.data):,} bytes; allowed: {CHUNK_BYTES:,}")
        await asyncio.to_thread(draft.write, request.data)
