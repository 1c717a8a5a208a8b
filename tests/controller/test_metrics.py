"""The controller's page for Prometheus: metrics of jobs, nodes and incidents."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.core import cost
from controller.core.incident_record import IncidentRecord, TimelineEntry
from controller.core.kinds import Cause
from controller.core.states import IncidentState, JobState
from controller.counters import OTHER, Counters
from controller.families import Counter, Gauge
from controller.store.curves import StepRow
from controller.web.metrics import FAMILIES
from diagnostics.core.finding import CheckVerdict
from outlast.ids import Attempt, IncidentId, JobId, NodeId
from outlast.v1 import agents_pb2, diagnostics_pb2, jobs_pb2
from tests.controller.fakes import Lab, lab, until
from tests.controller.test_diagnosis import diagnose, slow_between

JOB = JobId("job")


def row(step: int, *, attempt: int = 1, duration_s: float = 1.0) -> StepRow:
    return StepRow(
        job=JOB,
        step=step,
        attempt=attempt,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        tokens=10,
        duration_s=duration_s,
        at_s=float(step),
    )


def incident(**changes: object) -> IncidentRecord:
    base = IncidentRecord(
        incident=IncidentId("i1"),
        job=JOB,
        attempt=Attempt(1),
        state=IncidentState.CLOSED,
        opened_s=101.0,
        fault_s=100.0,
        fault_step=7,
        cause=Cause.NODE_LOST,
        timeline=(
            TimelineEntry(phase="fault", at_s=100.0),
            TimelineEntry(phase="detected", at_s=101.0),
            TimelineEntry(phase="suspending", at_s=101.0, state=JobState.SUSPENDING),
            TimelineEntry(phase="verdict", at_s=103.0, is_verdict=True),
            TimelineEntry(phase="starting", at_s=103.0, state=JobState.STARTING),
            TimelineEntry(phase="first_step", at_s=110.0),
            TimelineEntry(phase="closed", at_s=112.0),
        ),
        recovered_s=110.0,
        closed_s=112.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # field names are checked by replace


def test_cost_of_an_incident_is_split_by_its_timeline() -> None:
    it = incident()
    assert (cost.detection_s(it), cost.diagnosis_s(it), cost.recovery_s(it)) == (1.0, 2.0, 10.0)
    assert cost.lost_s(it) == 12.0
    assert cost.states_s(it) == {JobState.SUSPENDING: 2.0, JobState.STARTING: 9.0}


def test_incident_that_stopped_nobody_cost_nothing() -> None:
    it = incident(timeline=(TimelineEntry(phase="fault", at_s=100.0),), recovered_s=None)
    assert cost.lost_s(it) == 0.0
    assert cost.diagnosis_s(it) is None
    assert cost.recovery_s(it) is None


def test_redone_steps_are_no_progress() -> None:
    counters = Counters()
    counters.steps([row(1), row(2), row(3)], 0)
    counters.steps([row(2, attempt=2), row(3, attempt=2), row(4, attempt=2)], 3)
    counts = counters.job(JOB)
    assert (counts.goodput_s, counts.redone_steps) == (4.0, 2)
    assert counts.steps.buckets()[-1] == ("+Inf", 6.0)


def test_steps_that_two_nodes_tell_count_once() -> None:
    counters = Counters()
    counters.steps([row(1), row(2)], 0)
    counters.steps([row(1), row(2)], 2)
    assert counters.job(JOB).goodput_s == 2.0
    assert counters.job(JOB).redone_steps == 0


def test_steps_trained_before_this_controller_began_are_no_progress_of_now() -> None:
    counters = Counters()
    counters.steps([row(9), row(10), row(11)], 10)
    assert (counters.job(JOB).goodput_s, counters.job(JOB).redone_steps) == (1.0, 2)


def test_ended_jobs_are_forgotten() -> None:
    counters = Counters()
    counters.steps([row(1)], 0)
    counters.keep_only([])
    assert counters.job(JOB).goodput_s == 0.0


def test_words_of_agents_become_labels_only_within_bounds() -> None:
    counters = Counters()
    for stage in ("upload", 'no "word"', "x" * 100, *(f"stage-{n}" for n in range(200))):
        counters.checkpoint_failed(JOB, stage)
    troubles = counters.job(JOB).troubles
    assert troubles["upload"] == 1
    assert troubles[OTHER] > 100
    assert len(troubles) < 100


def test_last_matmul_of_a_node_is_remembered() -> None:
    counters = Counters()
    for gflops in (50.0, 60.0):
        finding = diagnostics_pb2.Finding(
            test="compute",
            metric="matmul_throughput",
            unit="GFLOP/s",
            value=gflops,
            verdict=CheckVerdict.PASS,
        )
        counters.found(NodeId("n0"), [finding])
    assert counters.matmul_flops == {"n0": 60e9}
    assert counters.findings == {("n0", "compute", "pass"): 2}


@pytest.mark.parametrize("family", [Gauge("outlast_step", ""), Counter("outlast_tokens_total", "")])
def test_samples_have_the_values_of_the_moment_at_which_they_were_taken(
    family: Gauge | Counter,
) -> None:
    """They are made later, by the thread that writes the page."""
    present = {"step": 7.0}
    taken = family.of(((), value) for value in present.values())
    present["step"] = 8.0
    assert [sample.value for sample in taken.samples] == [7.0]
    assert [sample.value for sample in taken.samples] == [7.0]


@pytest.mark.parametrize("suffix", ["_ms", "_milliseconds", "_percent", "_kb"])
def test_metrics_are_in_base_units(suffix: str) -> None:
    assert not [family.name for family in FAMILIES if family.name.endswith(suffix)]


def test_page_tells_of_a_job_from_its_start_to_its_recovery(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            first.num_samples = 100
            job_id = await bench.start_job(
                data={"global_batch": 20}, parallel={"dp": 2, "recompute": "full"}
            )
            await first.report(2.0, 1.5)
            await first.send(
                agents_pb2.AgentEvent(
                    job_id=job_id,
                    attempt=1,
                    checkpoint_committed=agents_pb2.CheckpointCommitted(
                        step=2, size_bytes=1000, upload_s=0.5, total_s=0.75
                    ),
                )
            )
            await first.send(
                agents_pb2.AgentEvent(
                    job_id=job_id,
                    attempt=1,
                    checkpoint_trouble=agents_pb2.CheckpointTrouble(step=3, stage="upload"),
                )
            )
            await second.exit(1, -9, step=2)
            await bench.started(2)
            await bench.train(3, resumed=2)
            await bench.reach(job_id, "RUNNING")
            # As a new agent reports what it finds in storage.
            await first.commit(job_id, 2, attempt=2)
            await until(lambda: first.acked_seq == first.sent_seq, "everything is durable")
            page = await asyncio.to_thread(read_page, bench)
            told = (await bench.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id))).job
        assert told.perplexity == pytest.approx(math.exp(1.5))
        assert told.epochs == pytest.approx(2 * 20 / 100)
        assert 0 < told.time_left_s <= (told.total_steps - 2) * 0.1
        assert told.hardware_flops_per_s > told.model_flops_per_s > 0
        job = {"job_id": job_id}
        assert page["outlast_perplexity", frozenset(job.items())] == told.perplexity
        assert page["outlast_epochs", frozenset(job.items())] == told.epochs
        assert page["outlast_time_left_seconds", frozenset(job.items())] == told.time_left_s
        flops = frozenset({**job, "convention": "windowed"}.items())
        again = page["outlast_hardware_flops_per_second", flops]
        assert again > page["outlast_model_flops_per_second", flops] > 0
        assert page["outlast_step", frozenset(job.items())] == 2
        assert page["outlast_loss", frozenset(job.items())] == 1.5
        assert page["outlast_restarts_total", frozenset(job.items())] == 1
        assert page["outlast_goodput_seconds_total", frozenset(job.items())] == pytest.approx(0.2)
        assert page["outlast_checkpoint_committed_step", frozenset(job.items())] == 2
        assert page["outlast_checkpoint_bytes_total", frozenset(job.items())] == 1000
        failed = {**job, "stage": "upload"}
        assert page["outlast_checkpoint_failures_total", frozenset(failed.items())] == 1
        upload = {**job, "stage": "upload"}
        name = "outlast_checkpoint_stage_duration_seconds_sum"
        assert page[name, frozenset(upload.items())] == 0.5
        commit = {**job, "stage": "commit"}
        assert page[name, frozenset(commit.items())] == 0.25
        killed = {**job, "cause": "worker_killed"}
        assert page["outlast_incident_recovery_seconds_count", frozenset(killed.items())] == 1
        lost = page["outlast_lost_seconds_total", frozenset(killed.items())]
        assert 0 < lost < 60
        parts = {
            dict(labels)["part"]: value
            for (family, labels), value in page.items()
            if family == "outlast_job_part_seconds"
        }
        assert set(parts) == {
            *("productive", "checkpoint", "detect", "diagnose"),
            *("provision", "restore", "redo", "paused"),
        }
        ettr = page["outlast_job_ettr_ratio", frozenset(job.items())]
        assert ettr == pytest.approx(parts["productive"] / sum(parts.values()), abs=0.01)
        assert page["outlast_job_ettr_hour_ratio", frozenset(job.items())] == pytest.approx(
            ettr, abs=0.01
        )
        states = [value for (family, _), value in page.items() if family == "outlast_job_state"]
        assert sum(states) == 1
        suite = {"suite": "preflight", "verdict": "pass"}
        assert page["outlast_diagnostic_runs_total", frozenset(suite.items())] == 2

    asyncio.run(scenario())


def test_page_tells_of_a_job_that_waits_for_a_person(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(2)
            resources = {"workers_per_node": 1, "standby": 3}
            job_id = await bench.start_job(recovery={"ladder": ["pause"]}, resources=resources)
            needs = ("outlast_job_needs_person", frozenset({("job_id", job_id)}))
            spares_wanted = ("outlast_spare_nodes_wanted", frozenset[tuple[str, str]]())
            page = await asyncio.to_thread(read_page, bench)
            assert (page[needs], page[spares_wanted]) == (0, 3)
            await agents[1].exit(1, -9, step=2)
            await bench.reach(job_id, "PAUSED")
            page = await asyncio.to_thread(read_page, bench)
            # Nothing is held ready for a job that does not go on by itself.
            assert (page[needs], page[spares_wanted]) == (1, 0)
            await bench.jobs.ResumeJob(jobs_pb2.ResumeJobRequest(job_id=job_id))
            await bench.reach(job_id, "STARTING")
            page = await asyncio.to_thread(read_page, bench)
            assert (page[needs], page[spares_wanted]) == (0, 3)

    asyncio.run(scenario())


def test_page_counts_what_a_run_over_several_nodes_concludes(tmp_path: Path) -> None:
    async def scenario() -> dict[tuple[str, str], float]:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(4)
            agents[1].digest = "off by one bit"
            await diagnose(bench)
            agents[1].digest = agents[0].digest
            slow_between(agents, 0, 2)
            await diagnose(bench)
            page = await asyncio.to_thread(read_page, bench)
        return {
            (
                name.removeprefix("outlast_diagnostic_"),
                " ".join(sorted(dict(labels).values())),
            ): value
            for (name, labels), value in page.items()
            if name.startswith("outlast_diagnostic_")
        }

    page = asyncio.run(scenario())
    assert page["findings_total", "device fail n1"] == 1
    assert page["findings_total", "device n1 pass"] == 2
    # The slow link speaks against neither of its ends.
    failed = [labels for name, labels in page if name == "findings_total" and "fail" in labels]
    assert failed == ["device fail n1"]
    assert {labels for name, labels in page if name == "bad_links_total"} == {"n0 n2"}
    assert page["bad_links_total", "n0 n2"] == 1
    assert page["runs_total", "fail preflight"] == 1
    assert page["runs_total", "pass preflight"] == 7


def test_prometheus_finds_the_agents_that_show_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            agents = await bench.add_agents(3)
            for agent, address in zip(agents, ("10.0.0.1:9100", "", "x y"), strict=True):
                agent.metrics_address = address
                await agent.rejoin()
            found = await asyncio.to_thread(read, bench, "/sd/agents")
            assert found == b'[{"targets":["10.0.0.1:9100"],"labels":{"node":"n0"}}]'

    asyncio.run(scenario())


def read(bench: Lab, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{bench.running.http}{path}", timeout=10) as answer:
        found: bytes = answer.read()
    return found


def read_page(bench: Lab) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the page, by name and labels."""
    text = read(bench, "/metrics").decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
