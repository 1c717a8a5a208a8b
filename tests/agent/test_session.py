"""The agent's line to the controller, where a real stream shows the case too rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import grpc
import grpc.aio
import pytest

from controller.agent.addresses import Controllers
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer
from controller.agent.core.line import Line
from controller.agent.session import Session, SessionEvents
from outlast.v1 import agents_pb2


class _RefusedAsItIsCancelled:
    """A stream whose refusal arrives together with the cancellation of its writer.

    gRPC then raises the refusal, and nothing is left of the cancellation: seen 3 times in
    at most 2,100 tries to stop an agent while a controller turned it away.
    """

    def __init__(self, writes: asyncio.Event) -> None:
        self._writes = writes

    async def write(self, message: agents_pb2.AgentMessage) -> None:
        self._writes.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), grpc.aio.Metadata()
            ) from None

    def cancel(self) -> bool:
        return True


class _Channel:
    def __init__(self, writes: asyncio.Event) -> None:
        self._writes = writes

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    def stream_stream(self, *_: object, **__: object) -> Callable[..., _RefusedAsItIsCancelled]:
        return lambda **_: _RefusedAsItIsCancelled(self._writes)

    unary_unary = unary_stream = stream_unary = stream_stream


def test_session_ends_when_cancelled_even_if_the_stream_ends_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        writes = asyncio.Event()
        monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: _Channel(writes))
        config = AgentConfig(
            node="n0",
            controller="127.0.0.1:1",
            state_dir=tmp_path,
            memory_dir=tmp_path,
            data_dir=tmp_path,
            workers=1,
        )
        session = Session(
            config,
            Controllers(config),
            Line(EventBuffer(max_events=1), now_s=0.0),
            SessionEvents(
                hello=agents_pb2.Hello,
                heartbeat=agents_pb2.Heartbeat,
                received=lambda _: None,
                welcomed=lambda _: None,
                lost=lambda: None,
                acknowledged=lambda _: None,
            ),
            Random(0),
        )
        running = asyncio.create_task(session.run())
        async with asyncio.timeout(60):
            await writes.wait()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=60)
        assert done, "the session goes on after it was cancelled"

    asyncio.run(scenario())
