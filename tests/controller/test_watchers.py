"""Clients that watch a large job: what they cost the controller's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from controller.core.changes import JobPut, NodePut
from controller.core.edge.edge import Edge
from controller.core.edge.listening import JUDGE_WITHIN_S
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import JobState, NodeState
from controller.rpc import job_views
from controller.rpc.jobs import JobsService
from controller.service import Service
from controller.sessions.logs import LogQueries
from controller.sessions.session import Sessions
from controller.store.code import CodeStore
from controller.store.curves import StepRow
from outlast.ids import Attempt, JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2, common_pb2, jobs_pb2
from tests.controller.core.driver import make_plan
from tests.controller.fakes import until
from tests.controller.test_busy import BusyLoop, service_on

JOB = JobId("large")
NUM_NODES, WORKERS = 12_500, 8
NUM_WATCHERS = 3
SPEC = parse_spec({"name": "large", "steps": 100_000, "parallel": {"dp": 1}})


def _job(num_nodes: int) -> JobRecord:
    return JobRecord(
        job_id=JOB,
        name="large",
        request_id="request",
        spec_json=SPEC.canonical_json(),
        checkpoint_url="memory://",
        plan=make_plan(nodes=num_nodes, workers_per_node=WORKERS, total_steps=100_000),
        submitted_s=time.time(),
        state=JobState.RUNNING,
        since_s=time.time(),
        reason="training since step 1",
        attempt=Attempt(1),
        nodes=tuple(NodeId(f"n{number:05d}") for number in range(num_nodes)),
    )


def _node(name: NodeId) -> NodeRecord:
    return NodeRecord(
        node=name,
        state=NodeState.ASSIGNED,
        since_s=0.0,
        reason="runs large",
        incarnation="one",
        address="10.0.0.1",
        rendezvous_port=29500,
        workers=WORKERS,
        job=JOB,
    )


def _beats(num_nodes: int, step: int) -> Iterator[tuple[NodeId, agents_pb2.Heartbeat]]:
    """A heartbeat of each node; rank 99,999 uses most memory."""
    split = common_pb2.StepSplit(forward_s=0.2, backward_s=0.4)
    for number in range(num_nodes):
        ranks = [
            agents_pb2.RankSummary(
                job_id=JOB,
                attempt=1,
                rank=rank,
                completed_step=step,
                use=agents_pb2.RankUse(split=split, peak_memory_bytes=1000 + rank),
            )
            for rank in range(WORKERS * number, WORKERS * (number + 1))
        ]
        yield NodeId(f"n{number:05d}"), agents_pb2.Heartbeat(at_s=time.time(), ranks=ranks)


def _row(step: int) -> StepRow:
    return StepRow(
        job=JOB,
        step=step,
        attempt=1,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=1024,
        duration_s=0.1,
        at_s=time.time(),
    )


def _running(service: Service, edge: Edge, num_nodes: int = 16) -> JobsService:
    """The large job in the service's tables, with every rank heard."""
    job = _job(num_nodes)
    for name in job.nodes:
        assert name is not None
        service.state.apply(NodePut(node=_node(name)))
    service.state.apply(JobPut(job=job))
    now_s = asyncio.get_running_loop().time()
    for node, beat in _beats(num_nodes, 1):
        edge.handle(node, agents_pb2.AgentMessage(heartbeat=beat), now_s)
    sessions = Sessions()
    return JobsService(
        service,
        sessions,
        edge,
        LogQueries(service, sessions, edge),
        "file:///tmp",
        CodeStore(Path("/tmp/none")),
        {},
    )


async def _follow(
    jobs: JobsService, received: list[jobs_pb2.WatchJobResponse], *, brief: bool
) -> None:
    request = jobs_pb2.WatchJobRequest(job_id=JOB, brief=brief)
    async for response in jobs.WatchJob(request, cast(Any, None)):
        received.append(response)


def test_watchers_of_a_large_job_share_one_view_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12,500 nodes of 8 ranks, three clients, two steps a second for a minute: a view
    is computed once a second, of so many ranks at once, and nodes are judged all the while."""
    looked_at: list[int] = []
    step_use = job_views.step_use

    def counting(summaries: Any) -> Any:
        ranks = list(summaries)
        looked_at.append(len(ranks))
        return step_use(ranks)

    monkeypatch.setattr(job_views, "step_use", counting)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)
        async with service_on(tmp_path) as (service, edge):
            jobs = _running(service, edge, NUM_NODES)
            judged_s = [loop.time()]
            judge = edge.judge_silence

            def judging(now_s: float) -> Any:
                judged_s.append(now_s)
                return judge(now_s)

            edge.judge_silence = judging  # type: ignore[method-assign]  # only notes when
            streams: list[list[jobs_pb2.WatchJobResponse]] = [[] for _ in range(NUM_WATCHERS)]
            tasks = [asyncio.create_task(_follow(jobs, each, brief=True)) for each in streams]
            begun_s, step = loop.time(), 1
            turns: list[tuple[float, float]] = []
            while loop.time() - begun_s < 60.0:
                step += 1
                turn_s = loop.time()
                loop.skew_s += 0.5
                service.offer([], [_row(step)])
                # Until all that was offered is written and every stream has it.
                service.curves.flush()
                service.changes.fire()
                for _ in range(4):
                    await asyncio.sleep(0)
                turns.append((turn_s, loop.time()))
            took_s = loop.time() - begun_s
            for responses in streams:
                await until(lambda r=responses: _last_step(r) == step, "the last step arrives")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert len(looked_at) <= took_s / job_views.VIEW_S + 2
        assert max(looked_at) <= job_views.USE_RANKS
        # The promise counts from the end of a pause, and nobody can judge in the middle of the
        # work: one turn before and one turn after come on top, as long as they really were.
        for before_s, after_s in pairwise(judged_s):
            meanwhile = [b - a for a, b in turns if b > before_s and a < after_s]
            work_s = max(meanwhile, default=0.0)
            assert after_s - before_s <= JUDGE_WITHIN_S + 2 * work_s + 0.1
        for first, *rest in streams:
            assert len(first.job.nodes) == NUM_NODES
            with_job = [response for response in rest if response.HasField("job")]
            assert 20 <= len(with_job) <= took_s / job_views.VIEW_S + 2
            # Whatever the number of ranks: a step report and a job without its nodes.
            assert max(response.ByteSize() for response in rest) < 2_000
            # The last rank was among those of the fortieth view, a part after the other.
            assert with_job[-1].job.step_use.peak_memory_bytes == 1000 + NUM_NODES * WORKERS - 1

    with asyncio.Runner(loop_factory=BusyLoop) as runner:
        runner.run(scenario())


def _last_step(responses: list[jobs_pb2.WatchJobResponse]) -> int:
    return max((report.step for r in responses for report in r.steps), default=0)


def test_a_change_of_state_is_shown_at_once_and_nodes_when_they_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service_on(tmp_path) as (service, edge):
            jobs = _running(service, edge)
            received: list[jobs_pb2.WatchJobResponse] = []
            task = asyncio.create_task(_follow(jobs, received, brief=True))
            await until(lambda: len(received) == 1, "the job as it is")
            job = replace(service.state.jobs[JOB], state=JobState.SUSPENDING)
            _put(service, job)
            await until(lambda: received[-1].job.state == "SUSPENDING", "its next state")
            assert received[-1].is_brief
            # What is only told is shown with the next view, though nothing else happens.
            job = replace(job, reason="n00000 is replaced", nodes=(NodeId("other"), *job.nodes[1:]))
            _put(service, job)
            await until(lambda: received[-1].job.reason == job.reason, "its reason")
            assert not received[-1].is_brief
            assert received[-1].job.nodes[0] == "other"
            _put(service, replace(job, state=JobState.CANCELLED, finished_s=1.0))
            await task
            assert received[-1].job.state == "CANCELLED"

    asyncio.run(scenario())


def test_a_client_that_asks_for_no_brief_messages_gets_whole_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service_on(tmp_path) as (service, edge):
            jobs = _running(service, edge)
            received: list[jobs_pb2.WatchJobResponse] = []
            task = asyncio.create_task(_follow(jobs, received, brief=False))
            await until(lambda: len(received) == 1, "the job as it is")
            _put(service, replace(service.state.jobs[JOB], state=JobState.CANCELLED))
            await task
            assert [len(response.job.nodes) for response in received] == [16] * 2

    asyncio.run(scenario())


def _put(service: Service, job: JobRecord) -> None:
    service.state.apply(JobPut(job=job))
    service.changes.fire()
