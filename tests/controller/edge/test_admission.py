"""Who is let in by a controller that listens, and how much it takes from all others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
import grpc.aio
import pytest

from controller import app, join_token
from controller.agent.addresses import Controllers
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer
from controller.agent.core.line import Line
from controller.agent.session import NotAdmittedError, Session, SessionEvents
from controller.agent.wire import MAX_HELLO_BYTES
from controller.options import Options
from controller.sessions.agents import HELLO_TIMEOUT_S
from controller.sessions.listening import within
from outlast.channel import HEADER, bearer
from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsStub
from tests.controller.fakes import until

TOKEN, OLDER, WRONG = "a" * 32, "b" * 32, "c" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A controller that listens, and what agents must show it."""

    grpc: str
    token_file: Path

    @asynccontextmanager
    async def call(
        self, token: str | None = TOKEN
    ) -> AsyncIterator[
        grpc.aio.StreamStreamCall[agents_pb2.AgentMessage, agents_pb2.ControllerMessage]
    ]:
        """A session that has said nothing yet."""
        shown = () if token is None else ((HEADER, bearer(token)),)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.grpc, options=options) as channel:
            yield AgentsStub(channel).Session(metadata=shown)


@asynccontextmanager
async def controller(folder: Path, *, tokens: str | None = f"{TOKEN}\n") -> AsyncIterator[Place]:
    stop = asyncio.Event()
    ready: asyncio.Future[app.Running] = asyncio.get_running_loop().create_future()
    token_file = folder / "token"
    if tokens is not None:
        token_file.write_text(tokens)
    options = Options(
        state_dir=folder / "state",
        grpc="127.0.0.1:0",
        http="127.0.0.1:0",
        join_token_file=token_file,
    )
    life = asyncio.ensure_future(app.run(options, ready.set_result, stop=stop))
    await asyncio.wait([ready, life], return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        life.result()
    try:
        yield Place(grpc=(await ready).grpc, token_file=token_file)
    finally:
        stop.set()
        await life


def hello(**changes: object) -> agents_pb2.AgentMessage:
    found = agents_pb2.Hello(
        node_id="n0", incarnation="one", address="127.0.0.1", rendezvous_port=4242, workers=1
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return agents_pb2.AgentMessage(hello=found)


async def answer(call: object, *messages: agents_pb2.AgentMessage) -> str:
    """The kind of the first message that the controller sends, or how it ends the call."""
    try:
        for message in messages:
            await call.write(message)  # type: ignore[attr-defined]
        first = await call.read()  # type: ignore[attr-defined]
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        first = grpc.aio.EOF
    if first is not grpc.aio.EOF:
        return str(first.WhichOneof("kind"))
    code, details = await call.code(), await call.details()  # type: ignore[attr-defined]
    return f"{code.name}: {details}"


async def answer_of(
    place: Place, *messages: agents_pb2.AgentMessage, token: str | None = TOKEN
) -> str:
    """The answer of a session of its own.

    gRPC ends a call with a status of its own when a write finds it ended and the controller's
    status has not been read; agents connect again then, and so does this.
    """
    async with asyncio.timeout(20.0):
        while True:
            async with place.call(token) as call:
                found = await answer(call, *messages)
            if found != "INTERNAL: Internal error from Core":
                return found


@pytest.mark.parametrize(
    ("token", "begins"),
    [
        (TOKEN, "welcome"),
        (OLDER, "welcome"),
        (WRONG, "UNAUTHENTICATED: the join token is wrong; start the agent with --join-token-file"),
        (None, "UNAUTHENTICATED: the join token is missing; start the agent with --join-token"),
        ("", "UNAUTHENTICATED: the join token is wrong"),
    ],
)
def test_agent_is_let_in_with_a_token_of_the_file_only(
    tmp_path: Path, token: str | None, begins: str
) -> None:
    async def scenario() -> None:
        tokens = f"{TOKEN}\n{OLDER}\n"
        async with controller(tmp_path, tokens=tokens) as place:
            assert (await answer_of(place, hello(), token=token)).startswith(begins)

    asyncio.run(scenario())


def test_peer_without_the_token_is_refused_before_it_has_sent_anything(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as place, place.call(None) as call:
            begun_s = time.monotonic()
            assert (await answer(call)).startswith("UNAUTHENTICATED")
            assert time.monotonic() - begun_s < HELLO_TIMEOUT_S

    asyncio.run(scenario())


def test_token_that_is_replaced_counts_from_the_next_session_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as place:
            place.token_file.write_text(f"{OLDER}\n")
            assert (await answer_of(place, hello(), token=TOKEN)).startswith("UNAUTHENTICATED")
            assert await answer_of(place, hello(), token=OLDER) == "welcome"
            # Nobody is let in for want of a file to compare with.
            place.token_file.unlink()
            assert (await answer_of(place, hello(), token=OLDER)).startswith("UNAVAILABLE")

    asyncio.run(scenario())


@pytest.mark.parametrize("size_bytes", [MAX_HELLO_BYTES + 1, 2**20])
def test_first_message_of_more_than_256_kib_is_refused(tmp_path: Path, size_bytes: int) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as place:
            found = await answer_of(place, hello(version="x" * size_bytes))
            assert found.startswith("RESOURCE_EXHAUSTED: the first message has")
            assert "allowed: 262144" in found
            fitting = hello(version="")
            fitting.hello.version = "x" * (MAX_HELLO_BYTES - fitting.ByteSize() - 6)
            assert MAX_HELLO_BYTES - 8 < fitting.ByteSize() <= MAX_HELLO_BYTES
            assert await answer_of(place, fitting) == "welcome"

    asyncio.run(scenario())


def test_ends_of_workers_in_a_hello_are_taken_as_agents_of_0_1_0_send_them(
    tmp_path: Path,
) -> None:
    """That release knew no inventory: its nodes would be lost until their agents start anew."""
    first = hello(version="0.1.0")
    for rank in range(16):
        ended = agents_pb2.WorkerStatus(job_id="gone", attempt=1, rank=rank)
        ended.exit.traceback, ended.exit.stderr_tail = "t" * 4096, "e" * 8192
        first.hello.worker_statuses.append(ended)

    async def scenario() -> None:
        async with controller(tmp_path) as place:
            assert await answer_of(place, first) == "welcome"

    asyncio.run(scenario())


def test_what_has_no_room_in_a_hello_follows_it(tmp_path: Path) -> None:
    status = agents_pb2.WorkerStatus(job_id="nobody-knows", attempt=1, rank=0, running=True)
    status.exit.traceback = "t" * 10_000
    inventory = agents_pb2.AgentMessage(
        inventory=agents_pb2.Inventory(worker_statuses=[status] * 20)
    )

    async def scenario() -> None:
        async with controller(tmp_path) as place:
            async with place.call() as call:
                assert await answer(call, hello(inventory_follows=True), inventory) == "welcome"
                # It was taken in: what nobody knows is stopped.
                second = await call.read()
                assert isinstance(second, agents_pb2.ControllerMessage)
                assert second.command.WhichOneof("kind") == "stop_workers"
            found = await answer_of(place, hello(inventory_follows=True), hello())
            assert found.startswith("INVALID_ARGUMENT: inventory: must be the second message")
            # Not before the hello is found to be a valid one.
            found = await answer_of(place, hello(inventory_follows=True, workers=0), inventory)
            assert found.startswith("INVALID_ARGUMENT: hello.workers")

    asyncio.run(scenario())


def test_peer_that_says_nothing_is_dropped_after_two_seconds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as place, place.call() as call:
            await call.wait_for_connection()
            begun_s = time.monotonic()
            found = await answer(call)
            took_s = time.monotonic() - begun_s
            assert found == "INVALID_ARGUMENT: hello: must be the first message, within 2 s"
            assert HELLO_TIMEOUT_S - 0.5 < took_s < HELLO_TIMEOUT_S + 3.0

    asyncio.run(scenario())


def test_connection_that_speaks_no_http2_is_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as place:
            host, _, port = place.grpc.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                async with asyncio.timeout(20.0):
                    # What the server says of itself, and then the end.
                    await reader.read()
            finally:
                writer.close()

    asyncio.run(scenario())


def session_of(place: Place, token_file: Path | None, statuses: int = 0) -> Session:
    """The agent's own end of the line."""
    folder = place.token_file.parent
    config = AgentConfig(
        node="n0",
        controller=place.grpc,
        state_dir=folder,
        memory_dir=folder,
        data_dir=folder,
        workers=1,
        join_token_file=token_file,
    )
    exit_ = agents_pb2.WorkerExit(code=1, traceback="t" * 5_000)
    workers = [
        agents_pb2.WorkerStatus(job_id="nobody-knows", attempt=1, rank=rank, exit=exit_)
        for rank in range(statuses)
    ]

    def say_hello() -> agents_pb2.Hello:
        said = hello().hello
        said.worker_statuses.extend(workers)
        return said

    line: Line[agents_pb2.AgentEvent] = Line(EventBuffer(100), now_s=0.0)
    events = SessionEvents(
        hello=say_hello,
        heartbeat=agents_pb2.Heartbeat,
        received=lambda message: None,
        welcomed=lambda _: line.welcomed(),
        lost=lambda: line.lost(0.0),
        acknowledged=line.acknowledged,
    )
    return Session(config, Controllers(config), line, events, Random(1))


def test_agent_without_the_right_token_ends_and_says_what_to_do(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(f"{WRONG}\n")

    async def scenario() -> None:
        async with controller(tmp_path) as place:
            with pytest.raises(NotAdmittedError, match="missing; start the agent with --join-tok"):
                await within(20.0, session_of(place, None).run())
            with pytest.raises(NotAdmittedError, match=f"wrong; .* showed that of {other}"):
                await within(20.0, session_of(place, other).run())

    asyncio.run(scenario())


def test_agent_that_was_let_in_before_waits_for_the_right_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as place:
            mine = tmp_path / "mine"
            mine.write_text(f"{TOKEN}\n")
            # Its workers have died with tracebacks that no hello has room for.
            session = session_of(place, mine, statuses=20)
            running = asyncio.create_task(session.run())
            await until(lambda: session.is_connected, "it is let in")
            place.token_file.write_text(f"{OLDER}\n")
            # As another agent of its name would do, which is let in.
            async with place.call(OLDER) as call:
                assert await answer(call, hello()) == "welcome"
            await until(lambda: not session.is_connected, "its session is replaced")
            mine.write_text(f"{OLDER}\n")
            await until(lambda: session.num_sessions == 2, "it is let in again")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_missing_token_file_is_made_for_its_owner_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path, tokens=None) as place:
            (token,) = join_token.read(place.token_file)
            assert place.token_file.stat().st_mode & 0o777 == 0o600
            async with place.call(token) as call:
                assert await answer(call, hello()) == "welcome"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty; it must have 16 to 512 letters"),
        ("short\n", "something else than a token as number 1"),
        (f"{TOKEN}\ntwo words in a token\n", "as number 2"),
        ("\x00\xff" * 20, "as number 1"),
    ],
)
def test_controller_does_not_start_on_a_token_file_that_says_nothing(
    tmp_path: Path, text: str, says: str
) -> None:
    async def scenario() -> None:
        async with controller(tmp_path, tokens=text):
            raise AssertionError("it started")

    with pytest.raises(join_token.JoinTokenError, match=says):
        asyncio.run(scenario())
