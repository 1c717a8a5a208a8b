"""The Agents service: the controller's end of each agent's stream.

Heartbeats end in the tables of the edge. Events become the machine's events, and
are acknowledged when what they brought is durable.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc

from controller import convert
from controller.core.edge.edge import Edge
from controller.core.edge.fields import MAX_RANKS
from controller.core.edge.reports import fold_findings
from controller.core.edge.rules import MAX_COUNT, Reason
from controller.core.events import Event
from controller.core.node_events import NodeDisconnected, NodeLeft
from controller.core.orders import RunSuite
from controller.counters import Counters
from controller.diagnosis.runs import DiagnosticRuns
from controller.grpc_errors import Context, abort, bad_field, unavailable
from controller.poison import NodeRefusedError
from controller.service import Service
from controller.sessions.incoming import Incoming
from controller.sessions.listening import within
from controller.sessions.logs import LogQueries
from controller.sessions.session import AgentSession, Sessions, StaleIncarnationError
from controller.store.curves import StepRow
from outlast.clock import node_time_ns
from outlast.crashpoints import CrashPoint, reach
from outlast.ids import CommandId, JobId, NodeId
from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsServicer

logger = logging.getLogger(__name__)

# A peer that has not said who it is has so long.
HELLO_TIMEOUT_S = 2.0
# Tracebacks of many workers, from an agent that has.
INVENTORY_TIMEOUT_S = 10.0
MAX_NODES = 16_384
_NODE_PATTERN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?")


class AgentsService(AgentsServicer):
    """One session per node."""

    def __init__(
        self,
        *,
        service: Service,
        sessions: Sessions,
        edge: Edge,
        logs: LogQueries,
        runs: DiagnosticRuns,
        counters: Counters,
        incoming: Incoming,
    ) -> None:
        self._service = service
        self._incoming = incoming
        self._sessions = sessions
        self._edge = edge
        self._logs = logs
        self._runs = runs
        self._tally = counters
        service.on_refreshed = self._retell_periods
        service.on_restored = sessions.drop_all
        service.on_forgotten = self._forget

    async def Session(
        self, request_iterator: AsyncIterator[agents_pb2.AgentMessage], context: Context
    ) -> AsyncIterator[agents_pb2.ControllerMessage]:
        """Take in what the agent sends, until either side ends it."""
        messages = aiter(request_iterator)
        hello = await self._hello(messages, context)
        try:
            session = self._sessions.open(NodeId(hello.node_id), hello.incarnation)
        except StaleIncarnationError as error:
            await abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                str(error),
                reason="STALE_INCARNATION",
            )
        reader: asyncio.Task[None] | None = None
        try:
            self._welcome(session, hello)
            reader = asyncio.create_task(self._read(session, messages), name=f"read-{session.node}")
            async for message in session.outgoing():
                yield message
        finally:
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            if self._sessions.closed(session):
                logger.info("session ended: node=%s", session.node)
                self._incoming.forget(session.node)
                self._service.post(NodeDisconnected(node=session.node))

    def _forget(self, node: NodeId) -> None:
        """Drop what is counted and remembered of a node that was deleted."""
        self._sessions.forget(node)
        self._tally.forget_node(node)

    def _retell_periods(self, nodes: Sequence[NodeId]) -> None:
        """Tell those of these agents whose job wants more or fewer heartbeats than they send."""
        now_s = asyncio.get_running_loop().time()
        for node in nodes:
            session = self._sessions.get(node)
            if session is None or session.heartbeat_period_s == self._edge.wanted_period_s(node):
                continue
            session.send(self._welcome_message(session))
            self._edge.told_period(node, session.heartbeat_period_s, now_s)

    async def _hello(
        self, messages: AsyncIterator[agents_pb2.AgentMessage], context: Context
    ) -> agents_pb2.Hello:
        try:
            first = await within(HELLO_TIMEOUT_S, anext(messages))
        except (TimeoutError, StopAsyncIteration):
            await bad_field(
                context, "hello", f"must be the first message, within {HELLO_TIMEOUT_S:g} s"
            )
        hello = first.hello
        if first.WhichOneof("kind") != "hello":
            await bad_field(context, "hello", "must be the first message")
        if not _NODE_PATTERN.fullmatch(hello.node_id):
            await bad_field(
                context,
                "hello.node_id",
                f"is {hello.node_id[:300]!r}; allowed: letters, digits, '-', '_' and '.'",
            )
        if not hello.incarnation:
            await bad_field(context, "hello.incarnation", "is required")
        if not 1 <= hello.workers <= MAX_RANKS:
            await bad_field(
                context, "hello.workers", f"is {hello.workers}; allowed: 1 to {MAX_RANKS}"
            )
        unfit = self._incoming.hello(hello, self._service.now_s)
        if unfit is not None:
            field = unfit.field.partition(".")[2]
            await bad_field(context, f"hello.{field}", f"cannot be taken in ({unfit.reason})")
        try:
            self._service.poison.check_node(hello.node_id)
        except NodeRefusedError as error:
            await unavailable(context, error, reason="NODE_REFUSED")
        if len(self._sessions) >= MAX_NODES:
            await abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_NODES} nodes are connected already",
                reason="TOO_MANY_NODES",
            )
        if hello.inventory_follows:
            await self._add_inventory(hello, messages, context)
        return hello

    async def _add_inventory(
        self,
        hello: agents_pb2.Hello,
        messages: AsyncIterator[agents_pb2.AgentMessage],
        context: Context,
    ) -> None:
        """Read what had no room in a hello, now that it is known to be a valid one."""
        try:
            second = await within(INVENTORY_TIMEOUT_S, anext(messages))
        except (TimeoutError, StopAsyncIteration):
            await bad_field(
                context, "inventory", f"must follow the hello within {INVENTORY_TIMEOUT_S:g} s"
            )
        if second.WhichOneof("kind") != "inventory":
            await bad_field(context, "inventory", "must be the second message, as announced")
        unfit = self._incoming.inventory(hello, second.inventory, self._service.now_s)
        if unfit is not None:
            await bad_field(context, unfit.field, f"cannot be taken in ({unfit.reason})")

    def _welcome(self, session: AgentSession, hello: agents_pb2.Hello) -> None:
        node = session.node
        session.metrics_address = hello.metrics_address
        # Before the machine hears of it: its commands must come after the welcome.
        session.send(self._welcome_message(session))
        session.acknowledge()
        now_s = asyncio.get_running_loop().time()
        joined = self._edge.handle(node, agents_pb2.AgentMessage(hello=hello), now_s)
        logger.info(
            "session opened: node=%s incarnation=%s address=%s workers=%d version=%s",
            node,
            hello.incarnation,
            hello.address,
            hello.workers,
            hello.version,
        )
        source = f"{node}/{hello.incarnation}/hello"
        self._service.offer(joined, source=source)
        self._service.changes.fire()

    def _welcome_message(self, session: AgentSession) -> agents_pb2.ControllerMessage:
        session.heartbeat_period_s = self._edge.wanted_period_s(session.node)
        welcome = agents_pb2.Welcome(
            term=self._service.term,
            heartbeat_period_s=session.heartbeat_period_s,
            controller_absence_limit_s=self._edge.absence_limit_s(session.node),
        )
        return agents_pb2.ControllerMessage(welcome=welcome)

    async def _read(
        self, session: AgentSession, messages: AsyncIterator[agents_pb2.AgentMessage]
    ) -> None:
        """Take messages in until the agent ends the stream or a newer session replaces it."""
        try:
            async for message in messages:
                if session.is_closed:
                    return
                received_ns = node_time_ns()
                await session.receipts.room()
                self._take(session, message)
                if message.heartbeat.clock_sent_ns:
                    session.asked_for_clock(message.heartbeat.clock_sent_ns, received_ns)
        except grpc.RpcError as error:
            logger.info("session broke: node=%s %s", session.node, error)
        except grpc.aio.AbortError:
            # A message was none, which the agent has been answered.
            logger.warning("session refused: node=%s", session.node)
        except Exception:
            # Our own mistake, provoked by one agent: it must not take the others down,
            # nor stay connected half-heard.
            logger.exception("session dropped: node=%s", session.node)
        finally:
            session.close()

    def _take(self, session: AgentSession, message: agents_pb2.AgentMessage) -> None:
        node = session.node
        now_s = asyncio.get_running_loop().time()
        self._service.post(*self._edge.heard(node, now_s))
        if not self._incoming.accepts(node, message, self._service.now_s):
            if message.HasField("event"):
                self._take_nothing(session, message.event)
            return
        match message.WhichOneof("kind"):
            case "heartbeat":
                session.links = message.heartbeat.links
                self._service.post(*self._edge.handle(node, message, now_s))
            case "event":
                self._take_event(session, message, now_s)
            case "log_chunk":
                self._logs.deliver(node, message.log_chunk)
            case "check_report":
                self._runs.deliver(node, message.check_report)
            case other:
                logger.warning("message ignored: node=%s kind=%s", node, other)

    def _take_nothing(self, session: AgentSession, event: agents_pb2.AgentEvent) -> None:
        """Acknowledge an event that says nothing, so that it does not come again."""
        if 0 < event.seq <= MAX_COUNT and session.receipts.take(event.seq):
            session.receipts.durable(event.seq)
        session.acknowledge()

    def _take_event(
        self, session: AgentSession, message: agents_pb2.AgentMessage, now_s: float
    ) -> None:
        receipts, event = session.receipts, message.event
        source = f"{session.node}/{receipts.incarnation}/{event.seq}"
        if self._service.poison.is_known(source):
            self._incoming.dropped(session.node, Reason.POISONED, "event")
            self._take_nothing(session, event)
            return
        if not receipts.take(event.seq):
            session.acknowledge()
            return

        def durable() -> None:
            receipts.durable(event.seq)
            present = self._sessions.get(session.node)
            if present is not None and present.receipts is receipts:
                present.acknowledge()

        try:
            rows = self._note(session.node, event)
            events = self._edge.handle(session.node, message, now_s)
        except Exception:
            # It would fail each time that it is sent again. The session ends, and what is true
            # on the node comes with its next hello.
            durable()
            raise
        if self._service.is_leaving:
            events = [_is_ours(event) for event in events]
        self._service.offer(events, rows, durable, source=source)

    def _note(self, node: NodeId, event: agents_pb2.AgentEvent) -> list[StepRow]:
        """Count what the machine does not keep; the rows of the curve in an event."""
        state, job_id = self._service.state, JobId(event.job_id)
        match event.WhichOneof("kind"):
            case "step_reports":
                rows = convert.step_rows(event)
                last = self._service.curves.last(job_id)
                self._tally.steps(rows, 0 if last is None else last.step)
                return rows
            case "command_result":
                result = event.command_result
                record = state.commands.get(CommandId(result.command_id))
                if record is None or record.node != node:
                    return []  # Answered before, or another node's.
                self._tally.found(node, result.findings)
                if isinstance(record.command, RunSuite):
                    verdict = fold_findings(result.findings).verdict
                    self._tally.suite_ended(record.command.suite, verdict)
            case "checkpoint_committed" if job_id in state.jobs:
                reach(CrashPoint.CHECKPOINT_HEARD)
                known_step = state.jobs[job_id].committed_step
                # A new agent reports what its predecessor may have reported.
                if known_step is None or event.checkpoint_committed.step > known_step:
                    self._tally.checkpoint_committed(job_id, event.at_s, event.checkpoint_committed)
                    self._service.history.committed(convert.commit_row(event))
            case "checkpoint_trouble" if job_id in state.jobs:
                self._tally.checkpoint_failed(job_id, event.checkpoint_trouble.stage)
        return []


def _is_ours(event: Event) -> Event:
    """An agent that leaves does so because this controller takes its nodes along."""
    return replace(event, is_ours=True) if isinstance(event, NodeLeft) else event
