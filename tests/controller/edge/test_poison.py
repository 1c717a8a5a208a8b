"""Events on which the machine fails: skipped once, with nothing half done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controller.core import job_progression
from controller.core.context import Context
from controller.core.edge.edge import Edge
from controller.core.events import CheckpointCommitted, Event, JobCancelRequested
from controller.core.machine import Machine
from controller.core.node_events import (
    NodeCordonRequested,
    NodeDrainRequested,
    NodeJoined,
    NodeUncordonRequested,
)
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.effects import Effects
from controller.poison import (
    MAX_OF_ALL,
    MAX_OF_JOB,
    MAX_OF_NODE,
    MAX_OF_REQUEST,
    MAX_OF_REQUEST_KIND,
    PoisonedError,
)
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2
from tests.controller.edge.bench import Bench, bench

IsBad = Callable[[Event], bool]


async def _until(found: Bench, condition: Callable[[], bool], what: str) -> None:
    for _ in range(50_000):
        if condition():
            return
        if found.loop.done():
            found.loop.result()
        await asyncio.sleep(0)
    raise AssertionError(f"never happened: {what}")


def _state(found: Bench) -> str:
    return " ".join(str(job.state) for job in found.service.state.jobs.values())


def _committed_step(found: Bench) -> int | None:
    (job,) = found.service.state.jobs.values()
    return job.committed_step


def _fail_on(monkeypatch: pytest.MonkeyPatch, is_bad: IsBad) -> list[Event]:
    """Have the machine fail in the middle of a decision; the events on which it did."""
    dispatch, failed = Machine._dispatch, []

    def mistaken(self: Machine, event: Event) -> None:
        dispatch(self, event)
        if is_bad(event):
            failed.append(event)
            ctx: Context = self._ctx
            for job in list(ctx.state.jobs.values()):
                ctx.put(replace(job, state=JobState.FAILED, high_step=10**6))
            raise ZeroDivisionError("our own mistake")

    monkeypatch.setattr(Machine, "_dispatch", mistaken)
    return failed


def _checkpoint(found: Bench, step: int) -> agents_pb2.AgentMessage:
    sender = found.streams[0].sender
    ((job, attempt),) = sender.running.values()
    committed = agents_pb2.CheckpointCommitted(step=step)
    return sender.event(
        agents_pb2.AgentEvent(job_id=job, attempt=attempt, checkpoint_committed=committed)
    )


def _is_step_7(event: Event) -> bool:
    return isinstance(event, CheckpointCommitted) and event.step == 7


def test_event_that_fails_a_turn_is_skipped_once_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = _fail_on(monkeypatch, _is_step_7)

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            (job_id,) = found.service.state.jobs
            stream = found.streams[0]
            # In one batch: what comes before it is kept, what comes after it is handled, too.
            stream.send(_checkpoint(found, 6))
            poisoned = _checkpoint(found, 7)
            stream.send(poisoned)
            await _until(found, lambda: bool(failed), "the machine fails")
            assert found.service.state == found.journal.load()
            job = found.service.state.jobs[job_id]
            assert (str(job.state), job.committed_step, job.high_step) == ("RUNNING", 6, 6)
            # Agents join again, and the same attempt trains on.
            await _until(found, lambda: len(found.sessions) == 3, "all are back")
            # As an agent that did not hear of the receipt sends it again.
            stream.send(poisoned)
            stream.sender.seq += 10
            stream.send(_checkpoint(found, 8))
            await _until(
                found, lambda: found.service.state.jobs[job_id].committed_step == 8, "step 8"
            )
            assert _state(found) == "RUNNING"
            assert found.service.state.jobs[job_id].attempt == 1
            assert len(failed) == 1
            assert found.service.poison.num_marked == 1
            assert found.journal.poisoned_sources() == [f"n0/n0x1/{poisoned.event.seq}"]

    asyncio.run(scenario())
    assert "poisoned event" in caplog.text

    async def after_a_restart() -> None:
        async with bench(tmp_path) as found:
            (source,) = found.journal.poisoned_sources()
            assert found.service.poison.is_known(source)

    asyncio.run(after_a_restart())


def test_client_whose_request_fails_a_turn_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_on(monkeypatch, lambda event: isinstance(event, JobCancelRequested))

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            (job_id,) = found.service.state.jobs
            with pytest.raises(PoisonedError, match="nothing has happened"):
                await found.service.tell(JobCancelRequested(job_id=job_id))
            assert _state(found) == "RUNNING"

    asyncio.run(scenario())


def test_clients_whose_requests_fail_again_and_again_are_refused_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (NodeCordonRequested, NodeUncordonRequested, NodeDrainRequested)
    failed = _fail_on(monkeypatch, lambda event: isinstance(event, kinds) and event.node != "n2")

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            for kind in kinds:
                for node in ("n0", "n1"):
                    for _ in range(MAX_OF_REQUEST):
                        with pytest.raises(PoisonedError, match="skipped it"):
                            await found.service.tell(kind(node=NodeId(node)))
                    with pytest.raises(PoisonedError, match=f"`{kind.__name__}.*and refuses it"):
                        await found.service.tell(kind(node=NodeId(node)))
                    await _until(found, lambda: len(found.sessions) == 3, "all are back")
            assert len(failed) == len(kinds) * MAX_OF_REQUEST_KIND > MAX_OF_ALL
            # What agents report is taken in as ever, and nothing of the job was set aside.
            found.streams[0].send(_checkpoint(found, 8))
            await _until(found, lambda: _committed_step(found) == 8, "step 8")
            assert _state(found) == "RUNNING"
            assert found.service.num_aside == 0

    asyncio.run(scenario())


def test_request_about_one_node_is_not_refused_for_failures_about_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_on(
        monkeypatch, lambda event: isinstance(event, NodeCordonRequested) and event.node == "n0"
    )

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            for _ in range(MAX_OF_REQUEST + 1):
                with pytest.raises(PoisonedError):
                    await found.service.tell(NodeCordonRequested(node=NodeId("n0")))
            await found.service.tell(NodeCordonRequested(node=NodeId("n2")))
            assert found.service.state.nodes[NodeId("n2")].cordoned

    asyncio.run(scenario())


def test_node_whose_messages_fail_turns_again_and_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = _fail_on(
        monkeypatch, lambda event: isinstance(event, NodeJoined) and event.node == "n2"
    )

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: len(failed) == MAX_OF_NODE, "it fails so often")
            await _until(found, lambda: _state(found) == "RUNNING", "the others train")
            assert len(failed) == MAX_OF_NODE
            assert "n2" not in found.sessions.incarnations()

    asyncio.run(scenario())


def _fail_on_state(
    monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[JobRecord], bool]
) -> list[JobId]:
    """Have the machine fail when it would move certain jobs on; the jobs on which it did."""
    advance, failed = job_progression.advance, []

    def mistaken(ctx: Context, job_id: JobId) -> None:
        job = ctx.state.jobs[job_id]
        if is_bad(job):
            failed.append(job_id)
            ctx.put(replace(job, high_step=10**6))
            raise ZeroDivisionError("our own mistake")
        advance(ctx, job_id)

    monkeypatch.setattr(job_progression, "advance", mistaken)
    return failed


def test_job_on_whose_state_the_machine_fails_is_set_aside_and_no_event_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: each event of any node was marked as poisonous, and after 16 the end came."""

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            (job_id,) = found.service.state.jobs
            failed = _fail_on_state(monkeypatch, lambda job: job.job_id == job_id)
            found.streams[0].send(_checkpoint(found, 7))
            await _until(found, lambda: bool(failed), "the machine fails")
            await _until(found, lambda: len(found.sessions) == 3, "all are back")
            for step in range(8, 11):
                found.streams[0].send(_checkpoint(found, step))
            await _until(
                found,
                lambda: found.service.state.jobs[job_id].committed_step == 10,
                "all of them are handled",
            )
            assert found.service.poison.num_marked == 0
            assert "set aside" in found.service.state.jobs[job_id].reason
            assert found.service.num_aside == 1
            assert len(failed) <= 2
            # All else is decided upon as ever.
            await found.service.tell(NodeCordonRequested(node=NodeId("n2")))
            assert found.service.state.nodes[NodeId("n2")].cordoned
            # A person's request is one more try, now with a controller that can.
            monkeypatch.undo()
            await found.service.tell(JobCancelRequested(job_id=job_id))
            await _until(
                found,
                lambda: found.service.state.jobs[job_id].state is JobState.CANCELLED,
                "it is cancelled",
            )
            assert found.service.num_aside == 0

    asyncio.run(scenario())


def test_request_for_a_job_that_still_fails_is_refused_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            (job_id,) = found.service.state.jobs
            failed = _fail_on_state(monkeypatch, lambda job: job.job_id == job_id)
            async with asyncio.timeout(30):
                for _ in range(MAX_OF_REQUEST + 1):
                    with pytest.raises(PoisonedError, match="nothing has happened"):
                        await found.service.tell(JobCancelRequested(job_id=job_id))
            assert found.service.num_aside == 1
            # The trial that says whether it is the job or the request fails, too.
            assert len(failed) <= 2 * MAX_OF_REQUEST + 2

    asyncio.run(scenario())


def test_controller_starts_on_a_job_state_that_makes_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
        _fail_on_state(monkeypatch, lambda job: True)
        async with bench(tmp_path) as found:
            await _until(found, lambda: found.service.num_aside == 1, "it is set aside")
            await _until(found, lambda: len(found.sessions) == 3, "agents are welcome")
            assert found.service.poison.num_marked == 0
            assert not found.loop.done()

    asyncio.run(scenario())


def test_job_whose_events_fail_again_and_again_is_set_aside_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = _fail_on(monkeypatch, lambda event: isinstance(event, CheckpointCommitted))

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            stream = found.streams[0]
            for step in range(7, 11):
                sessions, number = stream.num_sessions, len(failed)
                stream.send(_checkpoint(found, step))
                await found.settle()
                await found.service.tell()
                if len(failed) > number:
                    await _until(found, lambda: len(found.sessions) == 3, "all are back")
                    assert stream.num_sessions > sessions
            assert len(failed) == found.service.poison.num_marked == MAX_OF_JOB
            assert found.service.num_aside == 1

    asyncio.run(scenario())


def test_state_on_which_every_turn_fails_ends_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            _fail_on(monkeypatch, lambda event: not isinstance(event, NodeJoined))
            found.streams[0].send(_checkpoint(found, 7))
            with pytest.raises(ZeroDivisionError):
                await found.loop
            found.loop = asyncio.create_task(asyncio.sleep(0))

    asyncio.run(scenario())


def test_change_that_cannot_be_written_down_costs_its_event_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = Machine._dispatch

    def unwritable(self: Machine, event: Event) -> None:
        dispatch(self, event)
        if _is_step_7(event):
            job = next(iter(self._ctx.state.jobs.values()))
            # An integer that no database holds, where a text belongs.
            self._ctx.put(replace(job, error=object()))

    monkeypatch.setattr(Machine, "_dispatch", unwritable)

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            (job_id,) = found.service.state.jobs
            stream = found.streams[0]
            for step in (6, 7):
                stream.send(_checkpoint(found, step))
            await _until(found, lambda: found.service.poison.num_marked == 1, "it is marked")
            assert found.service.state == found.journal.load()
            assert found.service.state.jobs[job_id].committed_step == 6
            await _until(found, lambda: _state(found) == "RUNNING", "it trains on")

    asyncio.run(scenario())


def test_errors_of_observers_and_effects_are_counted_and_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise KeyError("our own mistake")

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: _state(found) == "RUNNING", "it trains")
            monkeypatch.setattr(Edge, "refresh", mistaken)
            monkeypatch.setattr(Effects, "run", mistaken)
            (job_id,) = found.service.state.jobs
            await found.service.tell(JobCancelRequested(job_id=job_id))
            samples = {
                sample.labels["part"]: sample.value
                for family in found.metrics.collect()
                for sample in family.samples
                if sample.name == "outlast_controller_internal_errors_total"
            }
            assert samples["watch"] >= 1
            assert samples["effects"] >= 1
            assert samples["log"] == 0
            assert not found.loop.done()

    asyncio.run(scenario())
