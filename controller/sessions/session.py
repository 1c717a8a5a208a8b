"""Open sessions of agents: one per node, with bounded queues in both directions.

What an agent sends is acknowledged by sequence number once it is durable. The
book of that outlives the session, because the same agent comes back with the
same numbers; a fresh agent process (another incarnation) begins a fresh book.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from outlast.clock import node_time_ns
from outlast.errors import FatalError
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, common_pb2

# Commands, log queries and acknowledgements on their way to one agent. An agent that
# does not read for so long loses its session and gets the open commands anew.
MAX_OUTBOX = 1_024
# Events of one agent that are not durable yet; its stream is not read beyond that.
MAX_UNDER_WAY = 1_024
# Incarnations of a node that were replaced by newer ones.
MAX_SUPERSEDED = 16


# A message to an agent, or what makes it once it can be sent: of large ones.
Outgoing = agents_pb2.ControllerMessage | Callable[[], agents_pb2.ControllerMessage]


class StaleIncarnationError(FatalError):
    """An agent process that was replaced by a newer one on the same node."""


class Receipts:
    """Which events of one agent process were taken in, and which of them are durable."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.durable_seq = 0
        self._taken_seq = 0
        # In order of their numbers; True when durable.
        self._under_way: dict[int, bool] = {}
        self._room = asyncio.Event()
        self._room.set()

    def take(self, seq: int) -> bool:
        """Whether the event is new. It is under way from now on."""
        if seq <= self._taken_seq:
            return False
        self._taken_seq = seq
        self._under_way[seq] = False
        if len(self._under_way) >= MAX_UNDER_WAY:
            self._room.clear()
        return True

    def durable(self, seq: int) -> None:
        """The event is durable. Acknowledged is only what all before it are, too."""
        self._under_way[seq] = True
        while self._under_way and self._under_way[first := next(iter(self._under_way))]:
            del self._under_way[first]
            self.durable_seq = first
        if len(self._under_way) < MAX_UNDER_WAY:
            self._room.set()

    async def room(self) -> None:
        """Wait until there is room for another event."""
        await self._room.wait()


class AgentSession:
    """The line to one agent."""

    def __init__(self, node: NodeId, receipts: Receipts) -> None:
        self.node = node
        self.receipts = receipts
        self.is_closed = False
        # Told to the agent by `Welcome`.
        self.heartbeat_period_s = 0.0
        # host:port of the agent's metrics, "" when it shows none.
        self.metrics_address = ""
        # Of the newest heartbeat.
        self.links: Sequence[common_pb2.LinkWindow] = ()
        self._outbox: deque[Outgoing] = deque()
        self._ready = asyncio.Event()
        self._acked_seq = 0
        # The last question for our clock that was not answered: when it was sent and received.
        self._asked_ns: tuple[int, int] | None = None

    def send(self, message: Outgoing) -> bool:
        """Queue a message; False when the session is over."""
        if self.is_closed:
            return False
        if len(self._outbox) >= MAX_OUTBOX:
            self.close()
            return False
        self._outbox.append(message)
        self._ready.set()
        return True

    def asked_for_clock(self, sent_ns: int, received_ns: int) -> None:
        """A heartbeat wants to know the time here; only the newest one is answered."""
        self._asked_ns = (sent_ns, received_ns)
        self._ready.set()

    def acknowledge(self) -> None:
        """Tell the agent what is durable by now."""
        self._ready.set()

    def close(self) -> None:
        """End the session; what is queued is dropped."""
        self.is_closed = True
        self._ready.set()

    async def outgoing(self) -> AsyncIterator[agents_pb2.ControllerMessage]:
        """Messages for the agent, until the session is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            # Commands first: an acknowledgement is in no hurry.
            while self._outbox and not self.is_closed:
                message = self._outbox.popleft()
                yield message() if callable(message) else message
            if self.is_closed:
                return
            if self._asked_ns is not None:
                (sent_ns, received_ns), self._asked_ns = self._asked_ns, None
                yield agents_pb2.ControllerMessage(
                    clock_echo=agents_pb2.ClockEcho(
                        sent_ns=sent_ns, received_ns=received_ns, answered_ns=node_time_ns()
                    )
                )
            durable_seq = self.receipts.durable_seq
            if durable_seq > self._acked_seq:
                self._acked_seq = durable_seq
                yield agents_pb2.ControllerMessage(acked_event_seq=durable_seq)


class Sessions:
    """Who is connected."""

    def __init__(self, known: Mapping[NodeId, Sequence[str]] | None = None) -> None:
        """`known` are the incarnations of agents of which the journal tells, the newest last."""
        self._open: dict[NodeId, AgentSession] = {}
        self._receipts: dict[NodeId, Receipts] = {}
        self._superseded = {
            node: deque(incarnations[:-1], maxlen=MAX_SUPERSEDED)
            for node, incarnations in (known or {}).items()
        }
        self._newest = {node: incarnations[-1] for node, incarnations in (known or {}).items()}
        self._on_closed: list[Callable[[NodeId], None]] = []

    def __len__(self) -> int:
        return len(self._open)

    def on_closed(self, call: Callable[[NodeId], None]) -> None:
        """Call `call` with every node whose session has ended."""
        self._on_closed.append(call)

    def open(self, node: NodeId, incarnation: str) -> AgentSession:
        """A new session, in the place of an older one of the same node.

        Raises:
            StaleIncarnationError: a newer agent process has taken this one's place.
        """
        superseded = self._superseded.setdefault(node, deque(maxlen=MAX_SUPERSEDED))
        if incarnation in superseded:
            raise StaleIncarnationError(
                f"node {node}: a newer agent process has taken the place of {incarnation}"
            )
        newest = self._newest.get(node, incarnation)
        if newest != incarnation:
            superseded.append(newest)
        self._newest[node] = incarnation
        receipts = self._receipts.get(node)
        if receipts is None or receipts.incarnation != incarnation:
            receipts = self._receipts[node] = Receipts(incarnation)
        older = self._open.get(node)
        session = self._open[node] = AgentSession(node, receipts)
        if older is not None:
            older.close()
            self._tell_closed(node)
        return session

    def closed(self, session: AgentSession) -> bool:
        """The session has ended; whether no newer one had taken its place."""
        session.close()
        if self._open.get(session.node) is not session:
            return False
        del self._open[session.node]
        self._tell_closed(session.node)
        return True

    def forget(self, node: NodeId) -> None:
        """Drop what is known of the agents of a node that is on no list any more."""
        if node not in self._open:
            for table in (self._receipts, self._superseded, self._newest):
                table.pop(node, None)

    def get(self, node: NodeId) -> AgentSession | None:
        return self._open.get(node)

    def is_connected(self, node: NodeId) -> bool:
        return node in self._open

    def incarnations(self) -> dict[NodeId, str]:
        """The agent process of every connected node."""
        return {node: session.receipts.incarnation for node, session in self._open.items()}

    def nodes(self) -> list[NodeId]:
        """Every connected node."""
        return list(self._open)

    def metrics_addresses(self) -> dict[NodeId, str]:
        """Where the connected agents show their metrics; those that show none are left out."""
        found = {node: session.metrics_address for node, session in self._open.items()}
        return {node: address for node, address in found.items() if address}

    def send(self, node: NodeId, message: Outgoing) -> bool:
        """Send a message if the node is connected; whether it was."""
        session = self._open.get(node)
        return session is not None and session.send(message)

    def drop_all(self) -> None:
        """End every session without a word to anybody: the controller begins anew."""
        for session in list(self._open.values()):
            del self._open[session.node]
            session.close()
            self._tell_closed(session.node)

    def close_all(self) -> None:
        """End every session, for the end of the controller."""
        for session in self._open.values():
            session.close()

    def _tell_closed(self, node: NodeId) -> None:
        for call in self._on_closed:
            call(node)
