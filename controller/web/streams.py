"""Answers that come as server-sent events, and end when the controller stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from google.protobuf.message import Message
from starlette.responses import StreamingResponse

from controller.web.gateway import RequestError

# Proxies close what is silent for a minute.
KEEP_ALIVE_S = 15.0

Event = tuple[str, Any]
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Streams:
    """The streams that are open."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(
        self,
        messages: AsyncIterator[Message],
        events_of: Callable[[Message], Iterator[Event]],
    ) -> StreamingResponse:
        """Each message as events, then one that says that there are no more."""
        return StreamingResponse(
            self._lines(messages, events_of), media_type="text/event-stream", headers=_HEADERS
        )

    def stop(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()

    async def _lines(
        self,
        messages: AsyncIterator[Message],
        events_of: Callable[[Message], Iterator[Event]],
    ) -> AsyncIterator[str]:
        # A queue of one: who reads slowly holds up the call behind it, which bounds what waits.
        queue: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)
        task = asyncio.create_task(_copy(messages, events_of, queue))
        self._tasks.add(task)
        try:
            while True:
                line = None
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        line = await queue.get()
                except TimeoutError:
                    yield ": still there\n\n"
                    continue
                if line is None:
                    return
                yield line
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self._tasks.discard(task)


async def _copy(
    messages: AsyncIterator[Message],
    events_of: Callable[[Message], Iterator[Event]],
    queue: asyncio.Queue[str | None],
) -> None:
    """Every event as lines into the queue; None behind the last."""
    try:
        async for message in messages:
            for name, value in events_of(message):
                await queue.put(_event(name, value))
        await queue.put(_event("end", None))
    except RequestError as error:
        await queue.put(_event("failed", error.as_json()))
    except asyncio.CancelledError:
        # The controller stops: whoever reads is not left waiting.
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)
        raise
    await queue.put(None)


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"
