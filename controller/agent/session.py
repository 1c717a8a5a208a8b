"""The agent's line to the controller: one gRPC stream, kept up through everything.

While the controller is away, workers go on and events pile up in the buffer.
On a new connection the agent says who it is and what is true on its node; what is
sent then, and when workers are given up, `core/line` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from controller.agent.addresses import Controllers
from controller.agent.config import AgentConfig
from controller.agent.core.clock_probes import ANSWER_LIMIT_S, ClockProbes
from controller.agent.core.line import Line
from controller.agent.wire import introduction
from controller.join_token import JoinTokenError
from outlast.access import AccessError
from outlast.channel import open_aio_channel
from outlast.clock import node_time_ns, node_time_s
from outlast.errors import FatalError, RetryableError
from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsStub

if TYPE_CHECKING:
    from outlast.v1.agents_pb2_grpc import AgentsAsyncStub

    Call = grpc.aio.StreamStreamCall[agents_pb2.AgentMessage, agents_pb2.ControllerMessage]

logger = logging.getLogger(__name__)

# Until the controller says otherwise.
DEFAULT_HEARTBEAT_PERIOD_S = 2.0
WELCOME_TIMEOUT_S = 10.0
# Where there is another controller to ask: a frozen one takes connections and says nothing.
WELCOME_OR_NEXT_S = 5.0
# Full speed for a controller that restarts, 2 s at most for one that stays away; jitter
# keeps thousands of agents from arriving at the same instant.
BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 2.0
# Log chunks and findings waiting to be sent; whoever makes more has to wait.
MAX_OUTBOX = 64

_CHANNEL_OPTIONS = (
    # Heartbeats that the peer's kernel does not acknowledge for 20 s end the connection
    # (TCP_USER_TIMEOUT, which gRPC takes from the keepalive timeout). Pings themselves
    # are rarer than the 5 minutes below which a server takes them for abuse.
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.enable_retries", 0),
    # Each connection is a fresh one, even to the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


_NOT_ADMITTED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# How a controller refuses an agent whose place a newer one has taken.
_STALE_REASON = "STALE_INCARNATION"


class ReplacedError(FatalError):
    """Another agent of this node's name has taken its place; there can be only one."""


class NotAdmittedError(FatalError):
    """The controller wants a join token or a node's certificate, and this is not the right one."""


class SessionLostError(RetryableError):
    """There is no controller to send this to; whoever asked for it is gone."""


class UnansweredError(SessionLostError):
    """The controller takes what is sent and does not answer; there is another one to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvents:
    """What the agent gives to a session and hears from it."""

    hello: Callable[[], agents_pb2.Hello]
    heartbeat: Callable[[], agents_pb2.Heartbeat]
    received: Callable[[agents_pb2.ControllerMessage], None]
    welcomed: Callable[[agents_pb2.Welcome], None]
    """A session begins, or the controller changes how often it wants to hear from this node."""
    lost: Callable[[], None]
    """The session ended; questions that came over it need no answer."""
    acknowledged: Callable[[int], None]
    """The controller has all events up to this one."""


class Session:
    """Connects, and connects again, for as long as the agent lives."""

    def __init__(
        self,
        config: AgentConfig,
        controllers: Controllers,
        line: Line[agents_pb2.AgentEvent],
        events: SessionEvents,
        random: Random,
    ) -> None:
        self._config = config
        self._controllers = controllers
        self._line = line
        self._events = events
        self._random = random
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._outbox: deque[agents_pb2.AgentMessage] = deque()
        self._heartbeat: agents_pb2.Heartbeat | None = None
        self._heartbeat_period_s = DEFAULT_HEARTBEAT_PERIOD_S
        self._period_changed = asyncio.Event()
        self._probes = ClockProbes(watches=len(config.controller_addresses) > 1)
        # The last answer to one, until a heartbeat tells of it.
        self._round_trip: agents_pb2.ClockRoundTrip | None = None
        self.num_sessions = 0
        self.num_heartbeats = 0

    @property
    def is_connected(self) -> bool:
        """Whether there is a session just now."""
        return self._line.is_connected

    def wake(self) -> None:
        """There is a new event in the buffer: send it now."""
        self._wake.set()

    def beat_now(self) -> None:
        """Something in the heartbeat is news: send one now."""
        self._period_changed.set()

    async def send(self, message: agents_pb2.AgentMessage) -> None:
        """Send something that only the present connection is interested in.

        Raises:
            SessionLostError: there is none.
        """
        while self.is_connected and len(self._outbox) >= MAX_OUTBOX:
            self._room.clear()
            await self._room.wait()
        if not self.is_connected:
            raise SessionLostError("no controller is connected")
        self._outbox.append(message)
        self._wake.set()

    async def all_heard(self, timeout_s: float) -> bool:
        """Wait until the controller has every event of before; at once when it is away.

        False when it does not say so in time.
        """
        buffer, loop = self._line.buffer, asyncio.get_running_loop()
        last_seq, deadline_s = buffer.last_seq, loop.time() + timeout_s
        while self.is_connected and buffer.after(last_seq - 1):
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def run(self) -> None:
        """Keep a session until the task is cancelled.

        Raises:
            ReplacedError: the controller has a newer agent of this node.
            NotAdmittedError: this agent has never been let in, for want of the join token.
        """
        failures = 0
        # A stream that ends just as the task is cancelled raises its own error instead.
        while not _is_cancelled():
            address = self._controllers.address()
            sessions_before = self.num_sessions
            try:
                await self._run_once(address)
                reason = "the controller ended the session"
            except grpc.aio.AioRpcError as error:
                self._end_if_refused(address, error)
                reason = f"{error.code().name}: {error.details()}"
            except UnansweredError as error:
                self._controllers.has_failed()
                reason = str(error)
            except (TimeoutError, SessionLostError, JoinTokenError, AccessError) as error:
                reason = str(error) or "no welcome in time"
            except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
                # How gRPC refuses to write to a stream that has just ended.
                reason = f"the stream ended: {error}"
            except Exception as error:
                # Our own mistake, or no descriptors left: without a line this node is lost for
                # good, and with a new one perhaps not.
                logger.exception("session failed: node=%s", self._config.node)
                reason = repr(error)
            was_connected = self.num_sessions > sessions_before
            self._disconnected()
            log = logger.warning if was_connected or failures == 0 else logger.debug
            log("no controller: node=%s address=%s %s", self._config.node, address, reason)
            failures = 0 if was_connected else failures + 1
            if failures:
                self._controllers.has_failed()
            await asyncio.sleep(self._backoff_s(failures))

    def _end_if_refused(self, address: str, error: grpc.aio.AioRpcError) -> None:
        """Raise what another connection would not change."""
        if _is_stale(error):
            raise ReplacedError(
                f"another agent called {self._config.node} has joined the controller "
                f"at {address} after this one, which stops its workers and ends; give "
                "each agent a --node of its own"
            ) from error
        # One that was let in before has workers, and the right token may come into its file.
        if error.code() in _NOT_ADMITTED and self.num_sessions == 0:
            path, folder = self._config.join_token_file, self._config.tls_dir
            shown = "none was given" if path is None else f"it showed that of {path}"
            shown += "" if folder is None else f", with --tls-dir {folder}"
            raise NotAdmittedError(
                f"the controller at {address} lets {self._config.node} not in: "
                f"{error.details()} ({shown})"
            ) from error

    def _backoff_s(self, failures: int) -> float:
        longest_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(failures, 10))
        return longest_s * self._random.uniform(0.5, 1.0)

    async def _run_once(self, address: str) -> None:
        """One connection, until it ends."""
        way = await self._controllers.way(address)
        async with open_aio_channel(way.address, way.access, _CHANNEL_OPTIONS) as channel:
            stub = cast("AgentsAsyncStub", AgentsStub(channel))
            # Without an iterator we write ourselves; grpc-stubs does not know that way.
            call = stub.Session(metadata=way.metadata)  # type: ignore[call-arg]
            try:
                is_only = len(self._config.controller_addresses) == 1
                # The first write waits for the connection.
                async with asyncio.timeout(WELCOME_TIMEOUT_S if is_only else WELCOME_OR_NEXT_S):
                    for message in introduction(self._events.hello()):
                        await call.write(message)
                    first = await call.read()
                if not isinstance(first, agents_pb2.ControllerMessage):
                    raise SessionLostError("the session ended before a welcome")
                if first.WhichOneof("kind") != "welcome":
                    raise SessionLostError(f"expected a welcome, got {first.WhichOneof('kind')}")
                self._welcomed(way.address, first.welcome)
                await self._exchange(call)
            finally:
                call.cancel()

    async def _exchange(self, call: Call) -> None:
        """Send, receive and beat until one of the three ends."""
        tasks = [
            asyncio.create_task(work, name=f"session-{name}")
            for name, work in (
                ("receive", self._receive(call)),
                ("send", self._send_all(call)),
                ("beat", self._beat()),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        # The receiver knows the status of the stream; a failed write only knows that it failed.
        failures = [
            result
            for task, result in zip(tasks, results, strict=True)
            if task in done and isinstance(result, Exception)
        ]
        if failures:
            raise failures[0]

    def _take_periods(self, welcome: agents_pb2.Welcome) -> None:
        self._heartbeat_period_s = welcome.heartbeat_period_s or DEFAULT_HEARTBEAT_PERIOD_S
        self._events.welcomed(welcome)
        self._period_changed.set()

    def _welcomed(self, address: str, welcome: agents_pb2.Welcome) -> None:
        self._take_periods(welcome)
        self._probes.began()
        self._round_trip = None
        self.num_sessions += 1
        self._controllers.has_answered()
        logger.info(
            "controller connected: node=%s address=%s term=%d events_to_resend=%d",
            self._config.node,
            address,
            welcome.term,
            len(self._line.buffer),
        )

    def _disconnected(self) -> None:
        self._outbox.clear()
        if self.is_connected:
            self._events.lost()
            self._room.set()

    async def _receive(self, call: Call) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, agents_pb2.ControllerMessage):
                return
            match message.WhichOneof("kind"):
                case "acked_event_seq":
                    self._events.acknowledged(message.acked_event_seq)
                case "welcome":
                    # Another job wants to hear from this node more or less often.
                    self._take_periods(message.welcome)
                case "clock_echo":
                    self._clock_told(message.clock_echo)
                case _:
                    self._events.received(message)

    async def _send_all(self, call: Call) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for event in self._line.take_unsent():
                await call.write(agents_pb2.AgentMessage(event=event.payload))
            if self._heartbeat is not None:
                heartbeat, self._heartbeat = self._heartbeat, None
                self.num_heartbeats += 1
                heartbeat.seq = self.num_heartbeats
                self._ask_for_clock(heartbeat)
                await call.write(agents_pb2.AgentMessage(heartbeat=heartbeat))
            if self._outbox:
                await call.write(self._outbox.popleft())
                self._room.set()
                # One at a time: an event or a heartbeat must never wait for megabytes of logs.
                self._wake.set()

    def _ask_for_clock(self, heartbeat: agents_pb2.Heartbeat) -> None:
        """Just before it is sent: tell of the last round trip, and begin another if it is time."""
        if self._round_trip is not None:
            heartbeat.clock.CopyFrom(self._round_trip)
            self._round_trip = None
        if self._probes.is_due(asyncio.get_running_loop().time()):
            heartbeat.clock_sent_ns = node_time_ns()

    def _clock_told(self, echo: agents_pb2.ClockEcho) -> None:
        self._probes.answered()
        self._round_trip = agents_pb2.ClockRoundTrip(
            sent_ns=echo.sent_ns,
            received_ns=echo.received_ns,
            answered_ns=echo.answered_ns,
            returned_ns=node_time_ns(),
        )

    async def _beat(self) -> None:
        """Have a heartbeat sent every period; a line that is slow gets the newest only."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if self._probes.is_unanswered(loop.time()):
                raise UnansweredError(f"no answer in {ANSWER_LIMIT_S:g} s")
            heartbeat = self._events.heartbeat()
            heartbeat.at_s = node_time_s()
            self._heartbeat = heartbeat
            self._wake.set()
            self._period_changed.clear()
            due_s = max(due_s + self._heartbeat_period_s, loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s - loop.time()):
                    await self._period_changed.wait()
                # A new period starts with a heartbeat.
                due_s = loop.time()


def _is_stale(error: grpc.aio.AioRpcError) -> bool:
    """Whether the controller says that a newer agent is in this one's place."""
    if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
        return False
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has what a call has
    except (ValueError, DecodeError):
        return False
    info = error_details_pb2.ErrorInfo()
    details = status.details if status is not None else ()
    return any(each.Unpack(info) and info.reason == _STALE_REASON for each in details)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
