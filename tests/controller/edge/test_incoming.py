"""The gate: what an agent may say, and what becomes of all else."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.core.changes import State
from controller.core.edge.rules import Reason, plausible_time_s
from controller.sessions.incoming import CORRECTED, DROPPED, Incoming
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, common_pb2
from tests.controller.edge.bench import Bench, bench
from tests.controller.edge.mutants import Sender, mutate

NOW_S = 1.7e9


@pytest.mark.parametrize(
    ("at_s", "offset_s", "plausible_s"),
    [
        (NOW_S - 600.0, 0.0, NOW_S - 600.0),
        (NOW_S + 3.0, 0.0, NOW_S + 3.0),
        (NOW_S + 3_600.0, 0.0, NOW_S),
        (NOW_S + 3_600.0, -3_600.0, NOW_S),
        (NOW_S - 86_400.0 - 7.0, 86_400.0, NOW_S - 7.0),
        (math.nan, 0.0, NOW_S),
        (-math.inf, 0.0, NOW_S),
        (0.0, 0.0, NOW_S),
        (5.0, 0.0, NOW_S - 30 * 86_400.0),
    ],
)
def test_times_are_brought_to_the_controllers_clock(
    at_s: float, offset_s: float, plausible_s: float
) -> None:
    assert plausible_time_s(at_s, NOW_S, offset_s) == plausible_s


async def _running(found: Bench) -> None:
    """Wait until the job trains."""
    for _ in range(20_000):
        await asyncio.sleep(0)
        if [str(job.state) for job in found.service.state.jobs.values()] == ["RUNNING"]:
            return
    raise AssertionError(f"it does not train: {found.service.state.jobs}")


def _report(sender: Sender, **figures: float) -> agents_pb2.AgentMessage:
    ((job, attempt),) = sender.running.values()
    row = common_pb2.StepReport(step=1, loss=2.0, tokens=100, duration_s=0.1, at_s=time.time())
    for name, value in figures.items():
        setattr(row, name, value)
    good = common_pb2.StepReport(step=2, loss=1.5, tokens=100, duration_s=0.1, at_s=time.time())
    reports = agents_pb2.StepReports(reports=[row, good])
    return sender.event(agents_pb2.AgentEvent(job_id=job, attempt=attempt, step_reports=reports))


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"duration_s": math.nan}, Reason.NON_FINITE),
        ({"duration_s": -1.0}, Reason.OUT_OF_RANGE),
        ({"tokens": 2**63 - 1}, Reason.OUT_OF_RANGE),
        ({"step": 11}, Reason.OUT_OF_RANGE),
        ({"attempt": 2}, Reason.UNKNOWN_ATTEMPT),
    ],
)
def test_step_report_that_cannot_be_costs_only_itself(
    tmp_path: Path, figures: dict[str, float], reason: Reason
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _running(found)
            stream = found.streams[0]
            stream.send(_report(stream.sender, **figures))
            (job,) = found.service.state.jobs
            while not found.service.curves.read(job):
                await asyncio.sleep(0)
                assert not found.loop.done()
            assert [row.step for row in found.service.curves.read(job)] == [2]
            assert found.incoming.counts == {(DROPPED, reason): 1}
            samples = {
                (sample.labels["outcome"], sample.labels["reason"]): sample.value
                for family in found.metrics.collect()
                for sample in family.samples
                if sample.name == "outlast_controller_bad_reports_total"
            }
            assert samples[DROPPED, reason] == 1
            assert samples[CORRECTED, Reason.NON_FINITE] == 0

    asyncio.run(scenario())


def test_sum_of_tokens_ends_at_what_the_database_holds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _running(found)
            stream = found.streams[0]
            ((job, attempt),) = stream.sender.running.values()
            rows = [
                common_pb2.StepReport(
                    step=1,
                    attempt=attempt,
                    loss=1.0,
                    tokens=2**53 - 1,
                    duration_s=0.1,
                    at_s=time.time(),
                )
            ]
            (job_id,) = found.service.state.jobs
            tail = found.service.curves._tail(job_id)
            tail.tokens = 2**63 - 10
            stream.send(
                stream.sender.event(
                    agents_pb2.AgentEvent(
                        job_id=job,
                        attempt=attempt,
                        step_reports=agents_pb2.StepReports(reports=rows),
                    )
                )
            )
            while not found.service.curves.read(job_id):
                await asyncio.sleep(0)
                assert not found.loop.done()
            assert found.service.curves.num_tokens(job_id) == 2**63 - 1

    asyncio.run(scenario())


def test_only_a_node_with_a_part_in_the_attempt_may_report_on_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _running(found)
            (job_id,) = found.service.state.jobs
            inside, outside = found.streams[0], found.streams[2]
            assert not outside.sender.running
            outside.sender.running = dict(inside.sender.running)
            messages = [
                _report(outside.sender),
                outside.sender.progress(9),
                outside.sender._checkpoint(random.Random(1)),
                outside.sender._exit(random.Random(1)),
            ]
            for message in messages:
                outside.send(message)
            await found.settle()
            # Of the other node's rank.
            exit_ = inside.sender._exit(random.Random(1))
            exit_.event.worker_exited.rank = 1
            inside.send(exit_)
            # Acknowledged all the same, so that they do not come again for ever.
            for stream in (inside, outside):
                session = found.sessions.get(NodeId(stream.sender.node))
                assert session is not None
                for _ in range(1_000):
                    await asyncio.sleep(0)
                assert session.receipts.durable_seq == stream.sender.seq
            assert found.incoming.counts == {(DROPPED, Reason.NOT_PLACED): 5}
            job = found.service.state.jobs[job_id]
            assert (str(job.state), job.committed_step) == ("RUNNING", None)
            assert not found.service.state.incidents

    asyncio.run(scenario())


def test_clock_of_a_node_that_is_off_is_corrected_for(caplog: pytest.LogCaptureFixture) -> None:
    """Steps of an agent's clock by an hour or a day move none of what it reports."""
    for step_s in (3_600.0, -3_600.0, 86_400.0, -86_400.0):
        incoming, node = Incoming(State()), NodeId("n0")
        at_s = NOW_S + step_s
        beat = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(at_s=at_s))
        assert incoming.accepts(node, beat, NOW_S)
        event = agents_pb2.AgentMessage(
            event=agents_pb2.AgentEvent(
                seq=1, at_s=at_s - 2.0, host_sign=agents_pb2.HostSign(subject="disk")
            )
        )
        assert incoming.accepts(node, event, NOW_S)
        assert event.event.at_s == pytest.approx(NOW_S - 2.0)
    assert "clock is off" in caplog.text


def test_hundred_thousand_mutated_messages_end_no_controller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every field, NaN, extremes, wrong job, rank, attempt and order; memory stays flat."""

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _running(found)
            sizes_mib = []
            for number in range(10):
                await found.torment(10_000, random.Random(number))
                found.look()
                gc.collect()
                sizes_mib.append(_resident_mib())
            assert found.num_taken >= 100_000
            # Jobs have lived through it: they trained again and again. Some mutant may end one, as
            # when it says that all its ranks are done.
            jobs = found.service.state.jobs.values()
            assert sum(job.attempt for job in jobs) > 10
            assert all(0 <= job.high_step <= job.plan.total_steps for job in jobs)
            # Every incident is kept, and there were hundreds.
            assert sizes_mib[-1] - sizes_mib[2] < 16, sizes_mib
            assert found.journal.load() == found.service.state

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == []


@given(seed=st.integers(0, 2**32), changes=st.integers(1, 6))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_passes_is_within_its_rules(seed: int, changes: int) -> None:
    """A message that has passed once passes again as it is."""
    choice = random.Random(seed)
    incoming, node, sender = Incoming(State()), NodeId("n0"), Sender("n0")
    message = sender.any(choice)
    for _ in range(changes):
        mutate(message, choice)
    if not incoming.accepts(node, message, NOW_S):
        return
    again = Incoming(State())
    assert again.accepts(node, message, NOW_S)
    assert {reason for _, reason in again.counts} <= {Reason.IMPLAUSIBLE_TIME}


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096 / 2**20
