"""Runs of diagnostics over real gRPC: what is asked of agents, and what is made of answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa

from controller.diagnosis import asking
from controller.diagnosis.run import Progress, Request
from controller.store.database import Database
from controller.store.diagnoses import INTERRUPTED, MAX_KEPT, RUNNING, Diagnoses
from controller.store.tables import DIAGNOSES
from diagnostics.core.baseline import Baseline
from diagnostics.core.plans import PREFLIGHT, Check
from outlast.ids import NodeId
from outlast.v1 import diagnostics_pb2, incidents_pb2, jobs_pb2
from outlast.v1.diagnostics_pb2_grpc import DiagnosticsStub
from outlast.v1.incidents_pb2_grpc import IncidentsStub
from tests.controller.fakes import FakeAgent, Lab, lab, submit_request, until
from tests.controller.test_rpc import failure


async def diagnose(bench: Lab, **asked: object) -> diagnostics_pb2.DiagnosticRun:
    """A run to its end, as it is kept."""
    stub = DiagnosticsStub(bench.channel)
    request = diagnostics_pb2.RunDiagnosticsRequest(**asked)  # type: ignore[arg-type]
    started = await stub.RunDiagnostics(request)
    watch = diagnostics_pb2.WatchDiagnosticsRequest(run_id=started.run_id)
    async for update in stub.WatchDiagnostics(watch):
        last = update
    assert last.run.run_id == started.run_id
    assert not last.pending_nodes
    kept = diagnostics_pb2.GetDiagnosticsRequest(run_id=started.run_id)
    return (await stub.GetDiagnostics(kept)).run


def slow_between(agents: list[FakeAgent], one: int, other: int) -> None:
    agents[one].bandwidths[agents[other].node] = 0.02
    agents[other].bandwidths[agents[one].node] = 0.02


def failed(run: diagnostics_pb2.DiagnosticRun) -> tuple[list[str], list[tuple[str, str]]]:
    return (
        [report.node for report in run.node_reports if report.verdict == "fail"],
        [(link.node, link.peer) for link in run.links if link.verdict == "fail"],
    )


def test_a_bad_link_and_a_bad_node_are_told_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(5)
            healthy = await diagnose(bench)
            assert failed(healthy) == ([], [])
            assert len(healthy.links) == 10
            assert {report.figure for report in healthy.node_reports} == {1.0}
            slow_between(agents, 1, 3)
            assert failed(await diagnose(bench)) == ([], [("n1", "n3")])
            for agent in agents:
                agent.bandwidths = {"n2": 0.02}
            agents[2].bandwidths = dict.fromkeys(("n0", "n1", "n3", "n4"), 0.02)
            run = await diagnose(bench)
            assert failed(run) == (["n2"], [])
            # Each bad exchange was tried with both ends as the host.
            assert {order.WhichOneof("kind") for order in agents[2].orders} >= {"host", "guest"}

    asyncio.run(scenario())


def test_the_node_that_computes_otherwise_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(3)
            agents[1].digest = "off by one bit"
            run = await diagnose(bench)
            assert failed(run) == (["n1"], [])
            (finding,) = (found for found in run.findings if found.verdict == "fail")
            assert finding.threshold_source == "peers"
            # Of two alone nobody can say which one is wrong.
            two = await diagnose(bench, nodes=["n0", "n1"])
            assert failed(two) == ([], [])
            assert {report.verdict for report in two.node_reports} == {"inconclusive"}

    asyncio.run(scenario())


def test_a_node_that_does_not_answer_is_left_out_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(PREFLIGHT, checks=(Check(name="device", deadline_s=0.5),))
    monkeypatch.setattr("controller.diagnosis.run.SUITES", {"preflight": short})
    monkeypatch.setattr("controller.diagnosis.run.START_ALLOWANCE_S", 1.0)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(3)
            agents[0].silent_on = {"on_this_node"}
            run = await diagnose(bench)
            assert failed(run) == ([], [])
            reports = {report.node: report for report in run.node_reports}
            assert reports["n0"].verdict == "error"
            assert "did not answer within" in reports["n0"].reason
            assert [(link.node, link.peer) for link in run.links] == [("n1", "n2")]

    asyncio.run(scenario())


def test_a_node_that_leaves_ends_what_was_asked_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(2)
            agents[0].silent_on = {"on_this_node"}
            running = asyncio.create_task(diagnose(bench))
            await until(lambda: bool(agents[0].orders), "the node is asked")
            error = await failure(
                DiagnosticsStub(bench.channel).RunDiagnostics(
                    diagnostics_pb2.RunDiagnosticsRequest(nodes=["n0"])
                )
            )
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "is being checked in run" in (error.details() or "")
            await agents[0].stop()
            bench.agents.remove(agents[0])
            run = await running
            reports = {report.node: report.verdict for report in run.node_reports}
            assert reports == {"n0": "error", "n1": "pass"}

    asyncio.run(scenario())


def test_training_nodes_are_warned_about_and_checked_with_the_jobs_storage(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(2)
            job_id = await bench.start_job()
            slow_between(agents, 0, 1)
            run = await diagnose(bench, job_id=job_id)
            assert [report.node for report in run.node_reports] == ["n0", "n1"]
            assert "n0 trains" in run.notes[0]
            # A slow exchange beside training proves nothing.
            assert failed(run) == ([], [])
            order = next(o for o in agents[0].orders if o.WhichOneof("kind") == "on_this_node")
            assert order.is_disturbed
            assert job_id in order.checkpoint_url

    asyncio.run(scenario())


def test_a_fault_is_searched_for_and_the_bad_node_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(4)
            request = {
                "parallel": {"dp": 3},
                "data": {"global_batch": 6},
                "recovery": {"in_place_restarts": 0},
            }
            job_id = await _start_on_three(bench, agents, request)
            agents[1].digest = "off by one bit"
            await agents[0].exit(0, -9, step=2)
            await until(lambda: agents[3].count("start_workers") == 1, "the spare takes over")
            job = await bench.job(job_id)
            assert list(job.nodes) == ["n0", "n3", "n2"]
            (incident,) = (
                await IncidentsStub(bench.channel).ListIncidents(
                    incidents_pb2.ListIncidentsRequest(job_id=job_id)
                )
            ).incidents
            checks = {check.node: check.verdict for check in incident.node_checks}
            # The spare's own checks before its start are part of the story.
            assert checks == {"n0": "pass", "n1": "fail", "n2": "pass", "n3": "pass"}
            assert list(incident.culprit_nodes) == ["n1"]
            assert "checks after the fault failed" in incident.reason
            kept = await DiagnosticsStub(bench.channel).GetDiagnostics(
                diagnostics_pb2.GetDiagnosticsRequest(run_id=incident.diagnostic_run)
            )
            assert kept.run.origin == incident.incident_id

    asyncio.run(scenario())


def test_a_cancelled_job_has_its_nodes_checked_no_longer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(2)
            job_id = await bench.start_job(recovery={"in_place_restarts": 0})
            agents[0].silent_on = {"on_this_node"}
            await agents[0].exit(0, -9, step=2)
            await until(lambda: bool(agents[0].orders), "its nodes are checked")
            await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            await until(
                lambda: agents[0].orders[-1].WhichOneof("kind") == "stop", "the checks are ended"
            )
            assert agents[0].orders[-1].order_id == agents[0].orders[0].order_id

    asyncio.run(scenario())


async def _start_on_three(bench: Lab, agents: list[FakeAgent], changes: dict[str, object]) -> str:
    """A job that trains on the first three nodes; the fourth is free."""
    job_id: str = (await bench.jobs.Submit(submit_request(**changes))).job.job_id
    users = agents[:3]
    await until(lambda: all(agent.count("start_workers") == 1 for agent in users), "a start")
    await until(lambda: all(agent.running for agent in users), "workers run")
    for agent in users:
        await agent.progress(1, resumed=0)
    await bench.reach(job_id, "RUNNING")
    return job_id


def test_runs_are_kept_within_a_bound_and_open_ones_marked(tmp_path: Path) -> None:
    database = Database(tmp_path / "journal.sqlite")
    kept = Diagnoses(database)
    for number in range(MAX_KEPT + 5):
        kept.put(
            diagnostics_pb2.DiagnosticRun(
                run_id=f"r{number}",
                started_s=float(number),
                state=RUNNING,
                notes=["a note"],
                findings=[diagnostics_pb2.Finding(test="device", value=float(number))],
            )
        )
    newest = kept.get(f"r{MAX_KEPT + 4}")
    assert newest is not None
    assert [finding.value for finding in newest.findings] == [MAX_KEPT + 4.0]
    # A list is made at each start, and must not read the findings of so many runs.
    with database.transaction() as connection:
        documents = connection.execute(sa.select(DIAGNOSES.c.document)).scalars().all()
    assert not any("device" in document for document in documents)
    runs = kept.list()
    assert len(runs) == MAX_KEPT
    assert runs[0].run_id == f"r{MAX_KEPT + 4}"
    kept.recover()
    assert {run.state for run in kept.list()} == {INTERRUPTED}
    assert kept.get("r0") is None
    found = kept.get("r100")
    assert found is not None
    assert list(found.notes) == ["a note"]
    assert kept.load_baseline() == Baseline()
    kept.save_baseline(Baseline(runs={"pair": (1.0, 2.0)}))
    assert kept.load_baseline() == Baseline(runs={"pair": (1.0, 2.0)})
    database.close()


def test_progress_holds_a_bounded_number_of_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.diagnosis.run.MAX_FINDINGS", 3)
    request = Request(run_id="r", suite="preflight", origin="manual", nodes=(NodeId("n0"),))
    progress = Progress(request=request)
    for _ in range(5):
        progress.add(asking.broken(NodeId("n0"), "device", "no answer"))
    assert len(progress.findings) == 3
