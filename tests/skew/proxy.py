"""A gRPC proxy between agents and a controller, through which one side is of the previous release.

What that side sends is read by the protos of 0.1.0 and written again without what they do not have:
the other side hears no more than from a program of that release, and must do with that. Methods
that came later are not there.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.skew.previous import Method, as_of_then, methods

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[bytes, bytes]

_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """Which side says no more than the previous release did."""

    agents: bool
    controller: bool


@dataclass(slots=True, kw_only=True)
class Passed:
    """What went through a proxy so far."""

    address: str = ""
    num_sessions: int = 0
    # Messages by what became of them: "whole", "cut" or "dropped", of each side.
    from_agents: Counter[str] = field(default_factory=Counter)
    from_controller: Counter[str] = field(default_factory=Counter)


@contextmanager
def proxied(target: str, skew: Skew) -> Iterator[Passed]:
    """A proxy before the controller at `target`; at the end of the block its lines break."""
    passed = Passed()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            server = grpc.aio.server(options=_OPTIONS)
            server.add_generic_rpc_handlers(tuple(_handlers(channel, skew, passed)))
            passed.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            ended = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), ended))
            await ended.wait()
            await server.stop(grace=None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="proxy")
    thread.start()
    loop, ended = started.result(_START_S)
    try:
        yield passed
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


# Messages of each size pass, as they would without a proxy.
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


def _handlers(
    channel: grpc.aio.Channel, skew: Skew, passed: Passed
) -> Iterator[grpc.GenericRpcHandler[bytes, bytes]]:
    """One for each service of the previous release; what it did not have is UNIMPLEMENTED."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {}
    for path, method in methods().items():
        _, service, name = path.split("/")
        call = _passing_on(channel, path, method, skew, passed)
        # On the wire a single message is a stream of one.
        services.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(call)
    for service, handlers in services.items():
        yield grpc.method_handlers_generic_handler(service, handlers)


def _passing_on(
    channel: grpc.aio.Channel, path: str, method: Method, skew: Skew, passed: Passed
) -> Callable[[AsyncIterator[bytes], _Context], AsyncIterator[bytes]]:
    async def call(messages: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        passed.num_sessions += 1
        ups, downs = passed.from_agents, passed.from_controller
        upwards = _pass_on(messages, method.request, ups, cut=skew.agents)
        onwards = channel.stream_stream(path)(upwards, metadata=context.invocation_metadata())
        answers = _pass_on(aiter(onwards), method.response, downs, cut=skew.controller)
        try:
            async for message in answers:
                yield message
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details() or "")
        finally:
            onwards.cancel()

    return call


async def _pass_on(
    messages: AsyncIterator[bytes], kind: type[Message], counts: Counter[str], *, cut: bool
) -> AsyncIterator[bytes]:
    async for message in messages:
        left = as_of_then(message, kind) if cut else message
        counts["dropped" if left is None else "whole" if left == message else "cut"] += 1
        if left is not None:
            yield left
