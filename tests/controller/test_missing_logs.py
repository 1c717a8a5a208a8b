"""Logs of a job of which some nodes do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controller.core.attempt_record import AttemptRecord
from controller.core.changes import AttemptPut, IncidentPut, JobPut, NodePut
from controller.core.edge.edge import Edge
from controller.core.incident_record import IncidentRecord
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import IncidentState, JobState, NodeState
from controller.rpc.nodes import NodesService
from controller.service import Service
from controller.sessions.log_query import ANSWER_LIMIT_S, ANSWER_S
from controller.sessions.logs import LogQueries
from controller.sessions.session import AgentSession, Sessions
from controller.store.database import Database
from controller.store.node_certificates import NodeCertificates
from outlast.clock import SystemClock
from outlast.ids import Attempt, JobId, NodeId, incident_id
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2, jobs_pb2, nodes_pb2
from tests.controller.core.driver import make_plan
from tests.controller.fakes import until
from tests.controller.test_busy import BusyLoop, service_on

JOB = JobId("job")
SPEC = parse_spec({"name": "job", "steps": 100, "parallel": {"dp": 1}})


def _job(nodes: tuple[NodeId | None, ...], state: JobState = JobState.RUNNING) -> JobRecord:
    return JobRecord(
        job_id=JOB,
        name="job",
        request_id="request",
        spec_json=SPEC.canonical_json(),
        checkpoint_url="memory://",
        plan=make_plan(nodes=len(nodes), workers_per_node=2, total_steps=100),
        submitted_s=time.time(),
        state=state,
        since_s=time.time(),
        reason="training",
        attempt=Attempt(1),
        nodes=nodes,
    )


class Fleet:
    """The nodes of one job with two ranks each; all are connected, and none answers by itself."""

    def __init__(self, service: Service, edge: Edge) -> None:
        self.service = service
        self.edge = edge
        self.sessions = Sessions()
        self.logs = LogQueries(service, self.sessions, edge)
        self.nodes = (NodeId("n0"), NodeId("n1"))
        self.asked: dict[str, str] = {}
        self._open: dict[str, AgentSession] = {}
        self._tasks: list[asyncio.Task[None]] = []
        service.state.apply(JobPut(job=_job(self.nodes)))
        for node in self.nodes:
            service.state.apply(NodePut(node=_node(node)))
            self.connect(node)

    def connect(self, node: NodeId) -> None:
        session = self._open[node] = self.sessions.open(node, "one")
        self._tasks.append(asyncio.create_task(self._listen(session)))
        self.edge.told_period(node, 2.0, asyncio.get_running_loop().time())

    async def _listen(self, session: AgentSession) -> None:
        async for message in session.outgoing():
            if not message.log_query.cancel:
                self.asked[session.node] = message.log_query.query_id

    def disconnect(self, node: NodeId) -> None:
        self.sessions.closed(self._open[node])

    def put(self, *nodes: NodeId | None, state: JobState = JobState.RUNNING) -> None:
        self.service.state.apply(JobPut(job=_job(nodes, state)))

    def read(self, **fields: object) -> Reader:
        return Reader(self.logs, jobs_pb2.LogsRequest(job_id=JOB, **fields))  # type: ignore[arg-type]

    def lose(self, node: NodeId, attempt: int) -> None:
        """`node` fails in `attempt`; the next attempt runs on the other node alone."""
        self.disconnect(node)
        number = self.service.state.jobs[JOB].num_incidents + 1
        incident = IncidentRecord(
            incident=incident_id(JOB, number),
            job=JOB,
            attempt=Attempt(attempt),
            state=IncidentState.CLOSED,
            opened_s=1.0,
            fault_s=1.0,
            fault_step=1,
            culprits=(node,),
        )
        self.service.state.apply(IncidentPut(incident=incident))
        job = replace(
            _job((NodeId("n0"), None)), attempt=Attempt(attempt + 1), num_incidents=number
        )
        self.service.state.apply(JobPut(job=job))

    def begin(self, attempt: int, *nodes: NodeId) -> None:
        """Nodes have begun an attempt of the job."""
        record = AttemptRecord(
            job=JOB,
            attempt=Attempt(attempt),
            nodes=nodes,
            workers_per_node=2,
            rendezvous_host="10.0.0.1",
            rendezvous_port=29500,
            committed_step=-1,
            spec_json=SPEC.canonical_json(),
            checkpoint_url="memory://",
            owner="",
        )
        self.service.state.apply(AttemptPut(attempt=record))

    async def end(self, node: str) -> None:
        """The agent has nothing more to send."""
        await until(lambda: node in self.asked, "it is asked")
        end = agents_pb2.LogChunk(query_id=self.asked.pop(node), end=True)
        self.logs.deliver(NodeId(node), end)

    async def answer(self, node: str, *, end: bool = True, is_selected: bool = False) -> None:
        """What a healthy agent says."""
        await until(lambda: node in self.asked, "it is asked")
        query_id = self.asked[node]
        chunk = agents_pb2.LogChunk(
            query_id=query_id, rank=0, data=f"of {node}\n".encode(), is_selected=is_selected
        )
        self.logs.deliver(NodeId(node), chunk)
        if end:
            self.logs.deliver(NodeId(node), agents_pb2.LogChunk(query_id=query_id, end=True))

    async def pass_time(self, seconds: float, *, beating: tuple[str, ...] = ()) -> None:
        """Let time pass, half a second after the other, in which some nodes send heartbeats."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)
        for _ in range(round(seconds * 2)):
            loop.skew_s += 0.5
            for node in beating:
                self.service.post(*self.edge.heard(NodeId(node), loop.time()))
            await self.service.tell()
            await asyncio.sleep(0)


class Reader:
    """One client that reads logs."""

    def __init__(self, logs: LogQueries, request: jobs_pb2.LogsRequest) -> None:
        self.data: list[str] = []
        self.missing: list[tuple[str, str, tuple[int, int]]] = []
        self.task = asyncio.create_task(self._read(logs, request))

    async def ends(self) -> None:
        async with asyncio.timeout(10.0):
            await self.task

    async def _read(self, logs: LogQueries, request: jobs_pb2.LogsRequest) -> None:
        async for response in logs.read(request):
            if response.HasField("missing"):
                found = response.missing
                ranks = (found.first_rank, found.num_ranks)
                self.missing.append((response.node, found.reason, ranks))
            else:
                self.data.append(response.data.decode())


def _node(name: NodeId) -> NodeRecord:
    return NodeRecord(
        node=name,
        state=NodeState.ASSIGNED,
        since_s=0.0,
        reason="runs job",
        incarnation="one",
        address="10.0.0.1",
        rendezvous_port=29500,
        workers=2,
        job=JOB,
    )


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    async with service_on(folder) as (service, edge):
        await service.tell()
        yield Fleet(service, edge)


def run(scenario: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=BusyLoop) as runner:
        runner.run(scenario())  # type: ignore[arg-type]


def test_node_that_is_stopped_does_not_keep_the_logs_of_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            reader = found.read()
            await found.answer("n0")
            await until(lambda: reader.data == ["of n0\n"], "the healthy one's logs come")
            await found.pass_time(ANSWER_S + 2.0, beating=("n0",))
            await reader.ends()
            ((node, why, ranks),) = reader.missing
            assert (node, ranks) == ("n1", (2, 2))
            assert "nothing was heard of it for" in why

    run(scenario)


def test_node_whose_heartbeats_come_has_longer_to_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            reader = found.read(rank=3)
            await until(lambda: "n1" in found.asked, "it is asked")
            await found.pass_time(2 * ANSWER_S, beating=("n0", "n1"))
            assert not reader.task.done()
            await found.pass_time(ANSWER_LIMIT_S, beating=("n0", "n1"))
            await reader.ends()
            assert reader.missing == [("n1", "it did not answer within 30 s", (3, 1))]

    run(scenario)


def test_nodes_that_left_and_ranks_without_a_node_are_named_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            found.put(NodeId("n0"), NodeId("n1"), None)
            found.disconnect(NodeId("n1"))
            reader = found.read()
            await found.answer("n0", end=False)
            found.disconnect(NodeId("n0"))
            await reader.ends()
            assert reader.data == ["of n0\n"]
            assert sorted(reader.missing) == [
                ("", "the job has no node for them at present", (4, 2)),
                ("n0", "its agent left before it had sent all", (0, 2)),
                ("n1", "it is not connected", (2, 2)),
            ]

    run(scenario)


def test_nodes_of_an_attempt_are_those_that_began_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            found.begin(1, *found.nodes)
            found.disconnect(NodeId("n1"))
            # The place is free, or another's that has not begun.
            found.put(NodeId("n0"), None)
            for fields, ranks in (({}, (2, 2)), ({"rank": 3}, (3, 1))):
                reader = found.read(attempt=1, **fields)
                await found.end("n0")
                await reader.ends()
                assert reader.missing == [("n1", "it is not connected", ranks)]
            reader = found.read(attempt=1, rank=1)
            await found.end("n0")
            await reader.ends()
            assert reader.missing == []

    run(scenario)


@pytest.mark.parametrize("fields", [{"attempt": 1}, {"all_attempts": True}])
def test_nodes_that_were_lost_to_an_earlier_attempt_are_named(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            found.lose(NodeId("n1"), 1)
            reader = found.read(**fields)
            await found.end("n0")
            await reader.ends()
            # Which ranks it had is not known any more.
            assert reader.missing == [("n1", "it is not connected", (0, 0))]
            reader = found.read(attempt=2)
            await found.end("n0")
            await reader.ends()
            assert reader.missing == []

    run(scenario)


def test_a_rank_that_nobody_has_of_an_attempt_that_lost_a_node_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            found.lose(NodeId("n1"), 1)
            reader = found.read(attempt=1, rank=3)
            await found.end("n0")
            await reader.ends()
            why = "no connected node has any; they may be on n1, lost since then"
            assert reader.missing == [("", why, (3, 1))]
            reader = found.read(attempt=1, rank=0)
            await found.answer("n0")
            await reader.ends()
            assert (reader.data, reader.missing) == (["of n0\n"], [])

    run(scenario)


def test_an_agent_that_cannot_search_is_named_and_sends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as nodes:
            reader = nodes.read(grep="of n")
            # It does not say that it has heeded the pattern.
            await nodes.answer("n0")
            await nodes.answer("n1", is_selected=True)
            await reader.ends()
            assert reader.data == ["of n1\n"]
            why = "its agent is of an older version, which cannot search"
            assert reader.missing == [("n0", why, (0, 2))]

    run(scenario)


def test_who_follows_is_told_who_is_silent_and_when_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            reader = found.read(follow=True)
            await until(lambda: "n1" in found.asked, "it is asked")
            await found.pass_time(10.0, beating=("n0",))
            await until(lambda: len(reader.missing) == 1, "it is told")
            assert reader.missing[0][0] == "n1"
            await found.pass_time(2.0, beating=("n0", "n1"))
            await until(lambda: len(reader.missing) == 2, "it is told")
            assert reader.missing[1] == ("n1", "", (2, 2))
            assert not reader.task.done()
            # The end of the job, while the controller is busy with others.
            found.put(*found.nodes, state=JobState.SUCCEEDED)
            for _ in range(10):
                await found.pass_time(0.5, beating=("n0", "n1"))
                found.service.changes.fire()
            await reader.ends()

    run(scenario)


@pytest.mark.parametrize("is_idle", [True, False])
def test_stopped_node_is_listed_as_silent(tmp_path: Path, is_idle: bool) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as found:
            if is_idle:
                for node in found.nodes:
                    idle = replace(_node(node), state=NodeState.READY, job=None)
                    found.service.state.apply(NodePut(node=idle))
            certificates = NodeCertificates(Database(tmp_path / "certificates.sqlite"), 0.0)
            service = NodesService(
                found.service, found.sessions, found.edge, SystemClock(), certificates
            )
            await found.pass_time(45.0, beating=("n0",))
            answer = await service.ListNodes(nodes_pb2.ListNodesRequest(), None)  # type: ignore[arg-type]
            assert [(n.node_id, n.connected, n.late) for n in answer.nodes] == [
                ("n0", True, False),
                ("n1", True, True),
            ]
            await found.pass_time(1.0, beating=("n0", "n1"))
            answer = await service.ListNodes(nodes_pb2.ListNodesRequest(), None)  # type: ignore[arg-type]
            assert not any(node.late for node in answer.nodes)

    run(scenario)
