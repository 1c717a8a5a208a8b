"""Weeks of a job: what is kept of them, over a restart, too; what is found is noted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from bench import bare_controller
from bench.bare_controller import Bench
from bench.controller.fleet import (
    JOB,
    answer,
    beat,
    first_steps,
    join,
    spec_of_all,
    submit,
)
from controller.clock import SteadyClock
from controller.convert import plan_of
from controller.core.events import JobSubmitted
from controller.core.kinds import Cause
from controller.core.states import IncidentState
from controller.rpc import trends as trends_service
from controller.rpc.trends import node_statistics, page_of, place_of
from controller.service import Service
from controller.sessions.incoming import Incoming
from controller.store.curves import StepRow
from controller.store.database import Database
from controller.store.trends import DAY_S, KEPT_S, TrendStore
from controller.trends.watch import SAMPLE_PERIOD_S, WINDOW_S
from controller.web.metrics import trends as metrics
from controller.web.metrics.sources import Sources
from diagnostics.core.history import Hour
from diagnostics.core.hours import ReadUntil
from diagnostics.core.node_days import NodeDay
from outlast.detectors import DetectorsSpec
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2, trends_pb2, trends_pb2_grpc
from tests.cli.running import outlast, outlast_json
from tests.controller.fakes import lab

NODES = 4
HOUR_S = 3600.0
STEP_S = 120.0


@asynccontextmanager
async def training(folder: Path) -> AsyncIterator[Bench]:
    """A controller whose job trains on four nodes."""
    async with bare_controller.controller(folder) as bench:
        await join(bench, NODES)
        await submit(bench, NODES)
        await answer(bench)
        await first_steps(bench, NODES)
        yield bench


def past(bench: Bench, days: float, *, slower_a_day: float = 0.0, every: int = 0) -> int:
    """Steps of the last days up to now; how many."""
    count = round(days * DAY_S / STEP_S)
    begun_s = bench.service.now_s - count * STEP_S
    rows = []
    for step in range(1, count + 1):
        age_days = step * STEP_S / DAY_S
        rows.append(
            StepRow(
                job=JOB,
                step=step,
                attempt=1,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                tokens=1_000_000,
                duration_s=STEP_S * (1 + slower_a_day * age_days) * (1 + 0.001 * (step % 7))
                + (60.0 if every and step % every == 0 else 0.0),
                at_s=begun_s + step * STEP_S,
            )
        )
    bench.service.curves.take(rows)
    bench.service.curves.flush()
    return count


def hear(bench: Bench, *, slow_node: int | None = None, late_s: float = 0.0) -> None:
    """A heartbeat of every node; the ranks of one work longer, and the others wait for them."""
    for number in range(NODES):
        message = beat(number, 1)
        for summary in message.ranks:
            is_slow = number == slow_node
            summary.use.split.forward_s = 1.0 + (late_s if is_slow else 0.0)
            summary.use.split.dp_exposed_s = 0.1 + (0.0 if is_slow else late_s)
        now_s = asyncio.get_running_loop().time()
        node = NodeId(f"node-{number:05d}")
        bench.edge.handle(node, agents_pb2.AgentMessage(heartbeat=message), now_s)


def notes(bench: Bench) -> dict[Cause, IncidentState]:
    incidents = bench.service.state.incidents.values()
    return {each.cause: each.state for each in incidents if each.job == JOB}


def test_a_decline_over_days_is_kept_and_noted_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path) as bench:
            count = past(bench, 4, slower_a_day=0.02)
            await bench.trends.read()
            for _ in range(2):
                await bench.trends.look()
                await bench.service.tell()
            found = bench.trends.known()[JOB]
            assert found.speed is not None
            assert found.speed.ratio_per_week == pytest.approx(-0.13, abs=0.02)
            # But for the first three, and the hour that is open.
            assert count - 3 - 31 <= sum(hour.num_steps for hour in found.hours) <= count
            assert notes(bench) == {Cause.MFU_DECLINE: IncidentState.OPEN}
            (incident,) = bench.service.state.incidents.values()
            assert (incident.count, incident.action, incident.culprits) == (1, None, ())
            assert bench.service.state.jobs[JOB].attempt == 1

    asyncio.run(scenario())


def test_what_is_found_is_on_the_page_for_prometheus(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path) as bench:
            past(bench, 4, slower_a_day=0.02, every=15)
            await bench.trends.read()
            await bench.trends.look()
            shown = {
                (sample.name, *sample.labels.values()): sample.value
                for family in metrics.collect(sources_of(bench))
                for sample in family.samples
            }
            slope = shown["outlast_job_mfu_trend_ratio", JOB, "job"]
            assert slope == pytest.approx(-0.13, abs=0.02)
            other = shown["outlast_job_periodic_stall_ratio", JOB, "other"]
            assert other == pytest.approx(60 / 15 / (STEP_S + 4), rel=0.1)
            assert shown["outlast_job_periodic_stall_ratio", JOB, "eval.interval_steps"] == 0.0

    asyncio.run(scenario())


def test_what_is_kept_survives_a_restart_and_is_not_counted_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path) as bench:
            past(bench, 3)
            await bench.trends.read()
        database = Database(tmp_path / "journal.sqlite")
        before = TrendStore(database).hours(JOB, 0.0)
        until = TrendStore(database).read_until(JOB)
        database.close()
        assert len(before) >= 71
        async with bare_controller.controller(tmp_path) as again:
            await again.trends.read()
            store = TrendStore(_database(again))
            assert store.hours(JOB, 0.0) == before
            assert store.read_until(JOB) == until
            assert (await again.trends.report(JOB)).speed is not None

    asyncio.run(scenario())


def test_a_periodic_stall_is_noted_and_over_when_it_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path) as bench:
            past(bench, 3, every=15)
            await bench.trends.look()
            await bench.service.tell()
            assert notes(bench) == {Cause.PERIODIC_STALL: IncidentState.OPEN}
            past(bench, 3)
            for _ in range(3):
                await bench.trends.look()
                await bench.service.tell()
            assert notes(bench) == {Cause.PERIODIC_STALL: IncidentState.CLOSED}

    asyncio.run(scenario())


def test_notes_can_be_left_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bare_controller.controller(tmp_path) as bench:
            await join(bench, NODES)
            spec = spec_of_all(NODES).model_copy(update={"detectors": DetectorsSpec(trends="off")})
            await bench.service.tell(
                JobSubmitted(
                    job_id=JOB,
                    name=spec.name,
                    request_id="quiet",
                    spec_json=spec.canonical_json(),
                    checkpoint_url="file:///checkpoints",
                    plan=plan_of(spec),
                )
            )
            await answer(bench)
            await first_steps(bench, NODES)
            past(bench, 3, every=15)
            await bench.trends.look()
            await bench.service.tell()
            assert bench.trends.known()[JOB].stalls
            assert notes(bench) == {}

    asyncio.run(scenario())


def test_a_slow_node_is_found_among_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        now_s = time.time() // DAY_S * DAY_S + 1000.0
        monkeypatch.setattr(Service, "now_s", property(lambda _: now_s))
        async with training(tmp_path) as bench:
            hear(bench, slow_node=2, late_s=0.2)
            for _ in range(round(25 * WINDOW_S / SAMPLE_PERIOD_S)):
                await bench.trends.sample()
                now_s += SAMPLE_PERIOD_S
            days = bench.trends.node_days()
            slow = days[NodeId("node-00002")]
            assert (slow.num_windows, slow.slowest_ratio, slow.expected_ratio) == (24, 1.0, 0.25)
            assert slow.work_ratio == pytest.approx(1.4 / 1.2, rel=0.02)
            assert slow.last_ratio == 1.0
            assert slow.is_slow(NODES)
            assert slow.service_s == pytest.approx(24 * (WINDOW_S - SAMPLE_PERIOD_S))
            other = days[NodeId("node-00001")]
            assert (other.slowest_ratio, other.is_slow(NODES)) == (0.0, False)
            first, *_ = node_statistics(bench.service.state, days, [], 0.0)
            assert (first.node_id, first.is_slow, first.num_faults) == ("node-00002", True, 0)

    asyncio.run(scenario())


def test_lateness_of_replicas_is_kept_with_the_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        now_s = time.time() // HOUR_S * HOUR_S
        monkeypatch.setattr(Service, "now_s", property(lambda _: now_s))
        async with training(tmp_path) as bench:
            hear(bench, slow_node=0, late_s=0.4)
            for _ in range(round(2 * WINDOW_S / SAMPLE_PERIOD_S)):
                await bench.trends.sample()
                now_s += SAMPLE_PERIOD_S
            rows_until_s = now_s
            past(bench, (rows_until_s % HOUR_S) / DAY_S)
            now_s += 2 * HOUR_S
            await bench.trends.read()
            (hour,) = (await bench.trends.report(JOB)).hours
            assert hour.spread_s == pytest.approx(0.4)
            # Three nodes of four wait for the last.
            assert hour.late_s == pytest.approx(0.3)

    asyncio.run(scenario())


def test_trends_of_jobs_and_nodes_that_are_gone_are_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path) as bench:
            past(bench, 1)
            await bench.trends.read()
            store = TrendStore(_database(bench))
            other = JobId("gone")
            store.put_hours(other, [_hour(0.0)], ReadUntil(version=1, until_s=HOUR_S))
            assert set(store.jobs()) == {JOB, other}
            await bench.trends.read()
            assert store.jobs() == [JOB]
            assert store.hours(other, 0.0) == []
            store.add_days({NodeId("gone"): NodeDay(num_windows=1)}, int(time.time() // DAY_S))
            await bench.trends.look()
            assert bench.trends.node_days() == {}

    asyncio.run(scenario())


def test_tables_are_bounded(tmp_path: Path) -> None:
    database = Database(tmp_path / "journal.sqlite")
    try:
        store, job, node = TrendStore(database), JobId("j"), NodeId("n")
        old_s, new_s = 10 * HOUR_S, 10 * HOUR_S + KEPT_S + HOUR_S
        store.put_hours(job, [_hour(old_s)], ReadUntil(version=1, until_s=old_s + HOUR_S))
        store.put_hours(job, [_hour(new_s)], ReadUntil(version=2, until_s=new_s + HOUR_S))
        assert [hour.begun_s for hour in store.hours(job, 0.0)] == [new_s]
        day = NodeDay(num_windows=1, num_slowest=1, service_s=600.0)
        store.add_days({node: day}, 100)
        store.add_days({node: day}, 100)
        assert store.days(100)[node] == NodeDay(num_windows=2, num_slowest=2, service_s=1200.0)
        store.add_days({node: day}, 100 + int(KEPT_S // DAY_S) + 1)
        assert store.days(0)[node].num_windows == 1
        store.forget_node(node)
        assert store.days(0) == {}
    finally:
        database.close()


def test_the_call_answers_of_a_job_and_of_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            trends = trends_pb2_grpc.TrendsStub(bench.channel)
            found = await trends.GetJobTrends(trends_pb2.GetJobTrendsRequest(job_id=job_id))
            assert not found.HasField("speed")
            assert "a trend needs" in found.why_no_trend
            assert {node.node_id for node in found.nodes} == {"n0", "n1"}
            listed = await trends.ListNodeStatistics(trends_pb2.ListNodeStatisticsRequest(days=1))
            assert len(listed.nodes) == 2
            arguments = ("trends", job_id, "--controller", bench.running.grpc)
            shown = await asyncio.to_thread(outlast, *arguments)
            assert "no trend yet: 0 hours" in shown.stdout
            assert "no periodic stalls" in shown.stdout
            facts = await asyncio.to_thread(outlast_json, *arguments)
            assert (facts["job_id"], facts["hours"]) == (job_id, [])
            with pytest.raises(grpc.aio.AioRpcError, match="days: is 91; allowed: 1 to 90, or 0"):
                await trends.ListNodeStatistics(trends_pb2.ListNodeStatisticsRequest(days=91))
            with pytest.raises(grpc.aio.AioRpcError, match="no job"):
                await trends.GetJobTrends(trends_pb2.GetJobTrendsRequest(job_id="nobody"))

    asyncio.run(scenario())


def test_pages_of_nodes_have_each_once_the_slowest_first() -> None:
    found = [
        trends_pb2.NodeStatistics(node_id=f"n{number}", is_slow=slow, slowest_ratio=ratio)
        for number, (slow, ratio) in enumerate([(True, 0.4), (False, 0.9), (False, 0.25)] * 3)
    ]
    whole = node_statistics_order(found, most=0)
    assert whole[:3] == ["n0", "n3", "n6"]
    assert whole[3:6] == ["n1", "n4", "n7"]
    assert node_statistics_order(found, most=2) == whole
    assert node_statistics_order(found, most=9) == whole


def node_statistics_order(found: list[trends_pb2.NodeStatistics], most: int) -> list[str]:
    """Nodes as the pages have them, of up to `most`."""
    ordered, names, after = sorted(found, key=place_of), [], ""
    while True:
        request = trends_pb2.ListNodeStatisticsRequest(most=most, after=after)
        page = page_of(ordered, request)
        names += [each.node_id for each in page.nodes]
        after = page.next
        if not after:
            return names


def test_trends_of_a_job_have_only_the_slowest_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page shows them, and a job may have thousands."""
    monkeypatch.setattr(trends_service, "_MOST_NODES", 3)

    async def scenario() -> None:
        async with training(tmp_path) as bench:
            slow = {NodeId("node-00003"): NodeDay(num_windows=10, num_slowest=9)}
            TrendStore(_database(bench)).add_days(slow, int(bench.service.now_s // DAY_S))
            service = trends_service.TrendsService(bench.service, bench.trends, bench.runs, {})
            request = trends_pb2.GetJobTrendsRequest(job_id=JOB)
            found = await service.GetJobTrends(request, cast(Any, None))
            assert [node.node_id for node in found.nodes] == [
                *("node-00003", "node-00000", "node-00001")
            ]

    asyncio.run(scenario())


def sources_of(bench: Bench) -> Sources:
    return Sources(
        service=bench.service,
        edge=bench.edge,
        sessions=bench.sessions,
        effects=bench.effects,
        counters=bench.counters,
        incoming=Incoming(bench.service.state),
        clock=SteadyClock(),
        trends=bench.trends,
    )


def _database(bench: Bench) -> Database:
    return bench.service.curves._database


def _hour(begun_s: float) -> Hour:
    return Hour(
        begun_s=begun_s,
        attempt=1,
        layout="tp1",
        num_steps=10,
        tokens=10,
        seconds=10.0,
        step_s=1.0,
    )
