"""The service over real gRPC, with agents that have no workers."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controller.core.changes import StateChange
from controller.core.effects import Effect, SendCommand
from controller.core.events import Event
from controller.core.machine import Machine
from controller.core.node_events import WorkerExited
from controller.core.orders import Command, CommandRecord, StartWorkers, StopWorkers
from controller.core.settings import Settings
from controller.deciding import Decider
from controller.effects import Effects
from controller.items import Item
from controller.store.curves import PAGE_ROWS
from controller.store.journal import Journal
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, incidents_pb2, jobs_pb2, nodes_pb2
from outlast.v1.incidents_pb2_grpc import IncidentsStub
from outlast.v1.nodes_pb2_grpc import NodesStub
from tests.controller.fakes import FakeAgent, lab, submit_request, until
from tests.controller.test_process import fetch
from tests.diagnostics.spoken import message_from


def test_job_survives_a_worker_and_succeeds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            await first.report(2.5, 2.25, 2.125)
            await bench.train(3)
            await second.exit(1, -9, step=3)
            await bench.started(2)
            start = first.last("start_workers")
            assert start.attempt == 2
            assert start.start_workers.rank_nodes == ["n0", "n1"]
            await bench.train(4, resumed=3)
            job = await bench.reach(job_id, "RUNNING")
            assert (job.attempt, job.restarts) == (2, 1)
            await first.report(2.0, first_step=4)
            await first.exit(0, 0, step=10)
            await second.exit(1, 0, step=10)
            await first.commit(job_id, 10, attempt=2)
            job = await bench.reach(job_id, "SUCCEEDED")
            assert job.step == 4
            await until(lambda: first.count("forget_job") == 1, "the job is forgotten")
            incidents = await IncidentsStub(bench.channel).ListIncidents(
                incidents_pb2.ListIncidentsRequest(job_id=job_id)
            )
            (incident,) = incidents.incidents
            assert incident.state == "CLOSED"
            assert incident.cause == "worker_killed"
            assert incident.action == "restart_in_place"
            assert incident.fault_step == 3
            assert incident.steps_redone == 0
            assert "fork 0.010 s" in next(e.detail for e in incident.timeline if "fork" in e.detail)

    asyncio.run(scenario())


def test_healthy_heartbeats_reach_neither_machine_nor_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Event] = []
    appended: list[int] = []
    handle, append = Machine.handle, Journal.append

    def spy_handle(self: Machine, event: Event, now_s: float) -> object:
        handled.append(event)
        return handle(self, event, now_s)

    def spy_append(self: Journal, changes: list[object]) -> None:
        appended.append(len(changes))
        append(self, changes)  # type: ignore[arg-type]

    monkeypatch.setattr(Machine, "handle", spy_handle)
    monkeypatch.setattr(Journal, "append", spy_append)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(2)
            job_id = await bench.start_job()
            path = tmp_path / "journal.sqlite"
            await until(lambda: not _unacked(agents), "all is journalled")
            rows, num_handled, num_appended = _count_changes(path), len(handled), len(appended)
            for number in range(1, 2_001):
                for rank, agent in enumerate(agents):
                    summary = agents_pb2.RankSummary(
                        job_id=job_id,
                        attempt=1,
                        rank=rank,
                        phase="forward_backward",
                        completed_step=1 + number // 100,
                        last_operation=message_from(f"in dp all_reduce #{number}"),
                    )
                    await agent.heartbeat(summary)
            # Something that does count, sent after them on the same streams.
            for agent in agents:
                sent = await agent.report(1.0)
                await until(lambda a=agent, s=sent: a.acked_seq >= s, "the report is taken in")
            assert len(handled) == num_handled
            assert len(appended) == num_appended
            assert _count_changes(path) == rows

    asyncio.run(scenario())


def test_event_is_acknowledged_only_when_it_is_journalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: list[float] = []
    acked_before_commit: list[int] = []
    append = Journal.append

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            (agent,) = await bench.add_agents(1)

            def watching(self: Journal, changes: list[object]) -> None:
                acked_before_commit.append(agent.acked_seq)
                append(self, changes)  # type: ignore[arg-type]
                committed.append(time.monotonic())

            monkeypatch.setattr(Journal, "append", watching)
            agent.silent_on = {"run_suite"}
            request = submit_request(parallel={"dp": 1})
            await bench.jobs.Submit(request)
            await until(lambda: agent.count("run_suite") == 1, "preflight is asked for")
            num_commits = len(committed)
            await agent.answer(agent.last("run_suite"))
            await until(lambda: agent.acked_seq >= 1, "the answer is acknowledged")
            assert len(committed) > num_commits
            assert acked_before_commit[num_commits] == 0

    asyncio.run(scenario())


@dataclass
class Turn:
    """A turn of the controller's loop: what was decided upon, and what nodes were told."""

    events: list[Event] = field(default_factory=list)
    commands: list[CommandRecord] = field(default_factory=list)

    def told(self, kind: type[Command]) -> list[NodeId]:
        return sorted(each.node for each in self.commands if isinstance(each.command, kind))

    def heard(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.events)


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    """The turns of the loop from now on."""
    turns: list[Turn] = []
    decide, handle, run = Decider.decide, Machine.handle, Effects.run

    def deciding(self: Decider) -> tuple[list[Item], list[StateChange]]:
        turns.append(Turn())
        return decide(self)

    def handling(self: Machine, event: Event, now_s: float) -> list[Effect]:
        if turns:
            turns[-1].events.append(event)
        return handle(self, event, now_s)

    def running(self: Effects, effect: Effect) -> None:
        if turns and isinstance(effect, SendCommand):
            turns[-1].commands.append(effect.command)
        run(self, effect)

    monkeypatch.setattr(Decider, "decide", deciding)
    monkeypatch.setattr(Machine, "handle", handling)
    monkeypatch.setattr(Effects, "run", running)
    return turns


def test_worker_death_reaches_the_other_nodes_in_the_turn_that_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StopWorkers goes to every node in that turn, and StartWorkers to all in one as well: the
    controller's share of a recovery."""
    turns = _spied(monkeypatch)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(2)
            await bench.start_job(recovery={"retry_budget": 100, "in_place_restarts": 100})
            for round_ in range(1, 6):
                for agent in agents:
                    agent.silent_on = {"stop_workers"}
                await agents[0].exit(0, -9, step=round_)
                await until(
                    lambda n=round_: all(a.count("stop_workers") == n for a in agents), "stops"
                )
                for agent in agents:
                    await agent.answer(agent.last("stop_workers"))
                await bench.started(round_ + 1)
                await bench.train(round_ + 1, resumed=round_)
                await until(lambda: not _unacked(agents), "progress is taken in")

    asyncio.run(scenario())
    nodes = ["n0", "n1"]
    deaths = [turn for turn in turns if turn.heard(WorkerExited)]
    assert [turn.told(StopWorkers) for turn in deaths] == [nodes] * 5
    starts = [turn for turn in turns if turn.told(StartWorkers)]
    assert [turn.told(StartWorkers) for turn in starts] == [nodes] * 6


def test_worker_that_was_told_to_stop_is_no_evidence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            first.silent_on = second.silent_on = {"stop_workers"}
            await first.exit(0, 1, step=1, exception_type="builtins.ValueError")
            await until(lambda: second.count("stop_workers") == 1, "stop")
            await second.exit(1, -9, step=1, stopped=True)
            for agent in (first, second):
                await agent.answer(agent.last("stop_workers"))
            await bench.reach(job_id, "FAILED")
            found = await IncidentsStub(bench.channel).ListIncidents(
                incidents_pb2.ListIncidentsRequest(job_id=job_id)
            )
            assert [item.rank for item in found.incidents[0].evidence] == [0]
            assert found.incidents[0].cause == "user_error"

    asyncio.run(scenario())


def test_curve_is_exact_and_the_watch_brings_all_of_it(tmp_path: Path) -> None:
    losses = [0.1 + 0.2, 1e-310, math.nextafter(2.0, 3.0), math.inf, math.nan]

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            seen: list[float] = []
            states: list[str] = []

            async def watch() -> None:
                request = jobs_pb2.WatchJobRequest(job_id=job_id)
                async for update in bench.jobs.WatchJob(request):
                    seen.extend(report.loss for report in update.steps)
                    if update.HasField("job"):
                        states.append(update.job.state)

            watcher = asyncio.create_task(watch())
            await first.report(*losses[:2])
            await until(lambda: len(seen) == 2, "the first reports arrive")
            await first.report(*losses[2:], first_step=3)
            await first.exit(0, 0, step=10)
            await second.exit(1, 0, step=10)
            await first.commit(job_id, 10)
            await watcher
            request = jobs_pb2.GetJobRequest(job_id=job_id, with_steps=True)
            curve = [report.loss for report in (await bench.jobs.GetJob(request)).steps]
            for got in (seen, curve):
                assert [value.hex() for value in got] == [value.hex() for value in losses]
            assert states[0] == "RUNNING"
            assert states[-1] == "SUCCEEDED"

    asyncio.run(scenario())


def test_a_curve_of_several_pages_comes_whole(tmp_path: Path) -> None:
    losses = [1.0 / step for step in range(1, 2 * PAGE_ROWS + 2)]

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, _ = await bench.add_agents(2)
            job_id = await bench.start_job(steps=len(losses))
            for done in range(0, len(losses), 200):
                await first.report(*losses[done : done + 200], first_step=done + 1)
            request = jobs_pb2.GetJobRequest(job_id=job_id, with_steps=True)
            curve: list[float] = []
            deadline_s = time.monotonic() + 30.0
            while len(curve) < len(losses):
                assert time.monotonic() < deadline_s, len(curve)
                found = await bench.jobs.GetJob(request)
                curve = [report.loss for report in found.steps]
            assert curve == losses
            assert found.job.job_id == job_id

    asyncio.run(scenario())


def test_node_disappears_and_the_standby_takes_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, Settings(reconcile_s=0.5)) as bench:
            await bench.add_agents(3)
            request = submit_request(
                resources={"workers_per_node": 1, "standby": 1},
                recovery={
                    "heartbeat_period_s": 0.25,
                    "heartbeat_late_s": 0.75,
                    "heartbeat_lost_s": 1.5,
                    "heartbeat_silent_s": 4.0,
                },
            )
            job_id = (await bench.jobs.Submit(request)).job.job_id
            used = bench.agents[:2]
            await until(lambda: all(a.running for a in used), "workers run")
            # The agents heard that this job wants more heartbeats than they were told first.
            await until(lambda: used[0].welcomes[-1].heartbeat_period_s == 0.25, "welcome again")
            for agent in used:
                await agent.progress(1)
            await bench.reach(job_id, "RUNNING")
            nodes = NodesStub(bench.channel)

            async def node_state(name: str) -> str:
                found = await nodes.ListNodes(nodes_pb2.ListNodesRequest())
                return next(node.state for node in found.nodes if node.node_id == name)

            while await node_state("n2") != "STANDBY":
                await asyncio.sleep(0.01)
            await bench.agents[1].stop()
            await until(lambda: bool(bench.agents[2].running), "the standby starts")
            start = bench.agents[0].last("start_workers")
            assert start.start_workers.rank_nodes == ["n0", "n2"]
            assert await node_state("n1") in ("QUARANTINED", "RETIRED")

    asyncio.run(scenario())


def test_newer_session_replaces_the_older_and_its_process_stays_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            (old,) = await bench.add_agents(1)
            new = FakeAgent("n0", lambda: bench.running.grpc)
            bench.agents.append(new)
            new.start()
            await until(lambda: new.is_connected, "the newer process joins")
            await until(lambda: not old.is_connected, "the older one is out")
            sessions = old.num_sessions
            # It tries again every 20 ms, and is turned away for good.
            await asyncio.sleep(0.2)
            assert old.num_sessions == sessions
            assert new.is_connected
            assert new.num_sessions == 1

    asyncio.run(scenario())


def test_job_goes_on_after_everything_was_stopped(tmp_path: Path) -> None:
    """Ctrl-C ended controller and nodes; the next start finds agents without workers."""

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
        async with lab(tmp_path) as bench:
            assert (await bench.job(job_id)).state == "RUNNING"
            await bench.add_agents(2)
            await bench.started(1)
            assert bench.agents[0].last("start_workers").attempt == 2
            await bench.train(2, resumed=1)
            job = await bench.reach(job_id, "RUNNING")
            assert (job.attempt, job.restarts) == (2, 1)

    asyncio.run(scenario())


def _unacked(agents: list[FakeAgent]) -> bool:
    return any(agent.acked_seq < agent.sent_seq for agent in agents)


def _count_changes(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        count: int = connection.execute("select count(*) from facts").fetchone()[0]
    connection.close()
    return count


def test_health_is_asked_often_and_the_journal_written_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[int] = []
    probe = Journal.probe

    def counted(self: Journal) -> None:
        probes.append(self.term)
        probe(self)

    monkeypatch.setattr(Journal, "probe", counted)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            for _ in range(5):
                answer = await asyncio.to_thread(fetch, bench.running.http, "/healthz")
                assert json.loads(answer) == {"ok": True, "term": 1}
            assert len(probes) == 1

    asyncio.run(scenario())
