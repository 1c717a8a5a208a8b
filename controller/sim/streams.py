"""The controller's end of simulated agents' streams.

Messages are those of the wire, and pass the production gate and the production edge, as they
do in `controller.sessions.agents`. An event is acknowledged when what it brought is durable.

What does not belong here: which messages agents leave out (`heartbeats`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from controller.command_messages import NodesPacker, command_message
from controller.core.attempt_record import NodeStart
from controller.core.changes import State
from controller.core.edge.edge import Edge
from controller.core.edge.gate import Gate
from controller.core.edge.rules import Reason
from controller.core.node_events import NodeDisconnected
from controller.core.orders import CommandRecord
from controller.sim.network import Session
from controller.sim.violation import Violation
from outlast.ids import NodeId
from outlast.v1 import agents_pb2

if TYPE_CHECKING:
    from controller.sim.controller import Controller
    from controller.sim.world import World

# What the gate may find in what sound agents say: it is late, or from before a decision.
_LATE = (
    Reason.NOT_PLACED,
    Reason.UNKNOWN_ATTEMPT,
    Reason.UNKNOWN_JOB,
    Reason.UNKNOWN_KIND,
    Reason.TOO_MANY,
    # Held up by a cut for longer than clocks may differ.
    Reason.IMPLAUSIBLE_TIME,
)


class Streams:
    """Of one life of the controller."""

    def __init__(self, world: World, controller: Controller, state: State, edge: Edge) -> None:
        self._world = world
        self._controller = controller
        self._edge = edge
        self._gate = Gate(state, self)
        self._packer = NodesPacker()
        self.sessions: dict[NodeId, Session] = {}
        # Hellos that are not whole yet, by the number of their session.
        self._begun: dict[int, agents_pb2.Hello] = {}

    # What agents say

    def hear(self, session: Session, sent: agents_pb2.AgentMessage) -> None:
        """A message of an agent arrives."""
        message = agents_pb2.AgentMessage()
        # The gate changes what it corrects, and an agent may send the same again.
        message.CopyFrom(sent)
        kind = message.WhichOneof("kind")
        self._world.tracer.message(message)
        if kind == "hello" and self.sessions.get(session.node) is not session:
            self._begin(session, message.hello)
        elif kind == "inventory" and session.number in self._begun:
            hello = self._begun.pop(session.number)
            if self._gate.inventory(hello, message.inventory, self._world.now_s) is None:
                self._open(session, hello)
            else:
                self._refuse(session)
        elif self.sessions.get(session.node) is session:
            is_taken = self.take(session.node, message)
            if is_taken and kind == "event":
                self._acknowledge(session, message.event.seq)

    def take(self, node: NodeId, message: agents_pb2.AgentMessage) -> bool:
        """A message of an open stream; False when the controller dies of it."""
        world = self._world
        now_s = world.now_s
        if self._gate.accepts(node, message, now_s):
            return self._controller.handle_all(self._edge.handle(node, message, now_s))
        return self._controller.handle_all(self._edge.heard(node, now_s))

    def _begin(self, session: Session, hello: agents_pb2.Hello) -> None:
        if self._gate.hello(hello, self._world.now_s) is not None:
            self._refuse(session)
        elif hello.inventory_follows:
            self._begun[session.number] = hello
        else:
            self._open(session, hello)

    def _refuse(self, session: Session) -> None:
        self._world.network.drop(session, at_agent=True, at_controller=False)

    def _open(self, session: Session, hello: agents_pb2.Hello) -> None:
        """An agent is here; its older session, if any, is replaced."""
        world, node = self._world, session.node
        if session.broken:
            self._refuse(session)
            return
        self.sessions[node] = session
        session.open_at_controller = True
        # Before the machine hears of it: its commands must come after the welcome.
        self._welcome(session)
        joined = self._edge.handle(node, agents_pb2.AgentMessage(hello=hello), world.now_s)
        self._controller.handle_all(joined)
        world.pulse(node)

    def _welcome(self, session: Session) -> None:
        edge, node = self._edge, session.node
        session.period_s = edge.wanted_period_s(node)
        welcome = agents_pb2.Welcome(
            term=self._controller.term,
            heartbeat_period_s=session.period_s,
            controller_absence_limit_s=edge.absence_limit_s(node),
        )
        self._send(session, agents_pb2.ControllerMessage(welcome=welcome))

    def retell_periods(self, nodes: Iterable[NodeId]) -> None:
        """Tell those of these agents whose job wants more or fewer heartbeats than they send."""
        now_s = self._world.now_s
        for node in nodes:
            session = self.sessions.get(node)
            if session is None or not self._world.is_beating(node):
                continue
            self._hold_to_period(session)
            if session.period_s != self._edge.wanted_period_s(node):
                self._welcome(session)
                self._edge.told_period(node, session.period_s, now_s)
                self._hold_to_period(session)
            self._world.checkers.incidents.told_period(node, session.period_s)

    def _hold_to_period(self, session: Session) -> None:
        """From a heartbeat on, the next one may take as long as the agent was told."""
        now_s = self._world.now_s
        self._controller.handle_all(self._edge.heard(session.node, now_s))
        due_s = self._edge.silence_due_s(session.node)
        if due_s is not None:
            checks = self._world.checkers.incidents
            checks.may_be_silent(session.node, session.period_s, due_s - now_s)

    def lost(self, session: Session) -> None:
        """The session ended; that matters unless a newer one took its place."""
        if self.sessions.get(session.node) is session:
            del self.sessions[session.node]
            self._gate.forget(session.node)
            self._controller.handle(NodeDisconnected(node=session.node))

    # What agents are sent

    def command(self, record: CommandRecord, start: NodeStart | None) -> None:
        """Send a command, if its node is connected; made when it arrives, as it may be large."""
        session = self.sessions.get(record.node)
        if session is not None:
            packed = self._packer.pack(start)
            bring = self._bring_command
            self._world.network.send(session, bring, session, record, start, packed, up=False)

    def _bring_command(
        self, session: Session, record: CommandRecord, start: NodeStart | None, packed: bytes
    ) -> None:
        command = command_message(record, start, packed)
        self._bring(session, agents_pb2.ControllerMessage(command=command))

    def _acknowledge(self, session: Session, seq: int) -> None:
        acked = agents_pb2.ControllerMessage(acked_event_seq=seq)
        if self._world.fidelity.idle_messages:
            self._send(session, acked)
        elif not session.broken:
            self._bring(session, acked)

    def _send(self, session: Session, message: agents_pb2.ControllerMessage) -> None:
        self._world.network.send(session, self._bring, session, message, up=False)

    def _bring(self, session: Session, message: agents_pb2.ControllerMessage) -> None:
        agent = self._world.nodes[session.node].agent
        if agent is not None:
            self._world.tracer.message(message)
            agent.hear(session, message)

    # What the gate found

    def dropped(self, node: NodeId, reason: Reason, where: str) -> None:
        """Something was left out."""
        self._may_be_late(node, reason, where)

    def corrected(self, node: NodeId, reason: Reason, where: str) -> None:
        """A value was replaced by a harmless one."""
        self._may_be_late(node, reason, where)

    def clock_is_off(self, node: NodeId, offset_s: float) -> None:
        """Simulated clocks are right."""
        raise Violation(f"invariant 12: the clock of {node} seems to be off by {offset_s} s")

    def _may_be_late(self, node: NodeId, reason: Reason, where: str) -> None:
        self._world.trace("gate", node, f"{where}: {reason}")
        if reason not in _LATE:
            hours = self._world.hours
            raise Violation(f"invariant 12 at {hours:.4f} h: {node} says {where}: {reason}")
