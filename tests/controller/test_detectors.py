"""From reports and heartbeats to what the machine hears: hangs, stragglers, odd steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from controller import convert
from controller.core.changes import IncidentPut, State
from controller.core.edge.edge import Edge
from controller.core.edge.use_windows import WINDOW_S, WINDOW_SAMPLES
from controller.core.events import Detected, DetectionEnded, Event, JobStalled
from controller.core.incident_record import IncidentRecord
from controller.core.kinds import Cause
from controller.core.node_events import NodeClosed
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import IncidentState, JobState, NodeState
from controller.specs import settings_of
from controller.store.curves import StepRow
from outlast.ids import Attempt, IncidentId, JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2, common_pb2
from tests.controller.fakes import spec_document
from tests.controller.judged import judged
from tests.diagnostics.spoken import message_from

JOB = JobId("job")
NODES = (NodeId("n1"), NodeId("n2"))


def state_of(**detectors: str) -> State:
    """A job of two nodes with one rank each, training."""
    spec = parse_spec(spec_document(detectors=detectors))
    job = JobRecord(
        job_id=JOB,
        name="tiny",
        request_id="",
        spec_json=spec.canonical_json(),
        checkpoint_url="memory://",
        plan=convert.plan_of(spec),
        submitted_s=0.0,
        state=JobState.RUNNING,
        since_s=0.0,
        reason="",
        attempt=Attempt(1),
        nodes=NODES,
    )
    nodes = {
        name: NodeRecord(
            node=name,
            state=NodeState.ASSIGNED,
            since_s=0.0,
            reason="",
            incarnation="one",
            address="",
            rendezvous_port=0,
            workers=1,
            job=JOB,
        )
        for name in NODES
    }
    return State(jobs={JOB: job}, nodes=nodes)


class Agents:
    """An edge, and what agents say to it."""

    def __init__(self, state: State) -> None:
        self.edge = Edge(state, settings_of)
        self.edge.expect_known(0.0)
        self.closed = self.edge.closed

    def heartbeat(self, node: NodeId, heartbeat: agents_pb2.Heartbeat, now_s: float) -> list[Event]:
        events = self.edge.handle(node, agents_pb2.AgentMessage(heartbeat=heartbeat), now_s)
        return [*events, *judged(self.edge)]

    def wake(self, now_s: float, wall_s: float) -> list[Event]:
        return [*self.edge.wake(now_s, wall_s), *judged(self.edge)]

    def found(self, heartbeat: agents_pb2.Heartbeat, now_s: float) -> list[Event]:
        """What detectors find in a heartbeat."""
        node = NODES[heartbeat.ranks[0].rank]
        events = self.heartbeat(node, heartbeat, now_s)
        return [event for event in events if isinstance(event, (Detected, DetectionEnded))]

    def host(self, node: NodeId, event: agents_pb2.AgentEvent) -> list[Event]:
        return self.edge.handle(node, agents_pb2.AgentMessage(event=event), 5.0)

    def steps(self, rows: Sequence[StepRow]) -> list[Event]:
        reports = [
            common_pb2.StepReport(
                step=row.step,
                attempt=row.attempt,
                loss=row.loss,
                grad_norm=row.grad_norm,
                tokens=row.tokens,
                duration_s=row.duration_s,
                at_s=row.at_s,
            )
            for row in rows
        ]
        event = agents_pb2.AgentEvent(
            job_id=JOB,
            attempt=rows[0].attempt if rows else 1,
            step_reports=agents_pb2.StepReports(reports=reports),
        )
        return self.edge.handle(NODES[0], agents_pb2.AgentMessage(event=event), 5.0)


def beat(rank: int, **fields: object) -> agents_pb2.Heartbeat:
    values: dict[str, object] = {
        "job_id": JOB,
        "attempt": 1,
        "rank": rank,
        "phase": "gradient_sync",
        "completed_step": 7,
        **fields,
    }
    summary = agents_pb2.RankSummary(**values)  # type: ignore[arg-type]  # checked by protobuf
    return agents_pb2.Heartbeat(at_s=100.0, ranks=[summary])


def stands(rank: int, stalled_s: float, **fields: object) -> agents_pb2.Heartbeat:
    return beat(
        rank, stalled_s=stalled_s, stall_limit_s=1.8, stall_limit_source="learned", **fields
    )


def told(events: list[Event], kind: type) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def test_a_step_that_was_left_out_is_no_news() -> None:
    agents = Agents(state_of())
    left_out = replace(row(2, loss=math.nan), tokens=0)
    assert agents.steps([row(1), left_out, row(3)]) == []


def test_a_job_hangs_when_its_last_rank_says_that_it_stands_too() -> None:
    agents = Agents(state_of())
    waits = stands(0, 2.0, last_operation=message_from("in dp all_reduce #9"), entered={"dp": 9})
    assert not told(agents.heartbeat(NODES[0], waits, 10.0), JobStalled)
    assert not told(agents.heartbeat(NODES[1], stands(1, 1.7), 10.0), JobStalled)
    silent = stands(
        1,
        1.9,
        phase="data",
        last_operation=message_from("after dp all_reduce #8"),
        entered={"dp": 8},
    )
    (event,) = told(agents.heartbeat(NODES[1], silent, 10.2), JobStalled)
    assert isinstance(event, JobStalled)
    assert event.culprit_ranks == (1,)
    assert event.limit == "at most 1.8 s: learned"
    assert "rank 1 is in no operation (phase data" in event.detail
    assert event.stood == (
        "rank 0 in dp all_reduce #9 (gradient_sync); rank 1 after dp all_reduce #8 (data)"
    )
    assert not told(agents.heartbeat(NODES[1], silent, 10.4), JobStalled)


def test_a_rank_whose_limit_is_not_known_yet_is_waited_for() -> None:
    agents = Agents(state_of())
    agents.heartbeat(NODES[0], stands(0, 500.0), 10.0)
    assert not told(agents.heartbeat(NODES[1], beat(1, stalled_s=500.0), 10.0), JobStalled)


def test_who_holds_up_a_start_is_named_before_patience_with_it_ends() -> None:
    state = state_of()
    state.jobs[JOB] = replace(state.jobs[JOB], state=JobState.STARTING, deadline_s=100.0)
    agents = Agents(state)
    agents.heartbeat(
        NODES[0],
        beat(0, phase="restore", last_operation=message_from("in world all_gather #3")),
        10.0,
    )
    agents.heartbeat(NODES[1], beat(1, phase="groups", process_state="T"), 10.0)
    assert agents.wake(10.0, 98.0) == []
    (event,) = agents.wake(11.0, 99.5)
    assert isinstance(event, JobStalled)
    assert event.culprit_ranks == (1,)
    assert event.limit == "recovery.first_step_timeout_s is 1800 s"
    assert agents.wake(12.0, 100.5) == []


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
def test_a_stopped_rank_is_a_hang_whatever_the_others_do(state: JobState) -> None:
    jobs = state_of()
    jobs.jobs[JOB] = replace(jobs.jobs[JOB], state=state)
    agents = Agents(jobs)
    # One is not heard of at all, or moves.
    stopped = stands(1, 1.9, phase="restore", process_state="T")
    older = stands(1, 1.9, phase="restore", process_state="T", attempt=0)
    assert not told(agents.heartbeat(NODES[1], older, 10.0), JobStalled)
    (event,) = told(agents.heartbeat(NODES[1], stopped, 10.0), JobStalled)
    assert isinstance(event, JobStalled)
    assert event.culprit_ranks == (1,)
    assert event.limit == "at most 1.8 s: learned"
    assert "rank 1 stopped by a signal" in event.detail
    assert not told(agents.heartbeat(NODES[1], stopped, 10.4), JobStalled)


def test_a_rank_that_a_debugger_holds_for_a_moment_is_no_hang() -> None:
    agents = Agents(state_of())
    held = stands(1, 1.9, process_state="t")
    assert not told(agents.heartbeat(NODES[1], held, 10.0), JobStalled)


@pytest.mark.parametrize(("mode", "kind"), [("off", None), ("log", Detected)])
def test_hangs_are_told_or_left_alone_as_the_job_wants(mode: str, kind: type | None) -> None:
    agents = Agents(state_of(hang=mode))
    agents.heartbeat(NODES[0], stands(0, 2.0), 10.0)
    events = agents.heartbeat(NODES[1], stands(1, 2.0), 10.0)
    assert not told(events, JobStalled)
    assert [type(event) for event in events if isinstance(event, Detected)] == (
        [] if kind is None else [kind]
    )


def row(step: int, *, loss: float = 2.0, attempt: int = 1) -> StepRow:
    return StepRow(
        job=JOB,
        step=step,
        attempt=attempt,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=8,
        duration_s=0.1,
        at_s=float(step),
        eval_loss=None,
    )


def test_a_loss_that_is_no_number_is_told_and_over_after_a_while() -> None:
    agents = Agents(state_of(non_finite="log"))
    (found,) = agents.steps([row(1), row(2, loss=math.nan)])
    assert isinstance(found, Detected)
    assert (found.cause, found.acts) == (Cause.NON_FINITE, False)
    assert found.detail == "step 2: loss nan; the step's update was left out"
    assert agents.steps([row(step) for step in range(3, 600)]) == []
    (over,) = agents.steps([row(step) for step in range(600, 700)])
    assert isinstance(over, DetectionEnded)


def test_spikes_that_come_again_and_again_are_counted_and_reported_together() -> None:
    """A healthy tiny job had 105 in 7 minutes."""
    state = state_of()
    agents = Agents(state)
    agents.steps([row(step, loss=2 + step % 2 / 100) for step in range(1, 40)])
    events: list[Event] = []
    for step in range(40, 460):
        loss = 9.0 if step % 4 == 0 else 2 + step % 2 / 100
        events += agents.steps([row(step, loss=loss)])
    found = told(events, Detected)
    assert len(found) == len(events) <= 1 + 420 / 10
    # Of the last seconds, it is reported with the next.
    assert 103 <= sum(event.count for event in found if isinstance(event, Detected)) <= 105
    assert isinstance(found[-1], Detected)
    assert found[-1].detail.startswith("step 448: loss 9")


def test_an_odd_step_that_an_earlier_controller_reported_is_over_some_time() -> None:
    state = state_of()
    state.apply(
        IncidentPut(
            incident=IncidentRecord(
                incident=IncidentId("job.i1"),
                job=JOB,
                attempt=Attempt(1),
                state=IncidentState.OPEN,
                opened_s=1.0,
                fault_s=1.0,
                fault_step=-1,
                cause=Cause.SPIKE,
            )
        )
    )
    agents = Agents(state)
    (over,) = agents.steps([row(step) for step in range(2, 700)])
    assert isinstance(over, DetectionEnded)
    assert over.cause is Cause.SPIKE


def test_a_spike_of_the_loss_is_acted_on_and_one_of_the_norm_is_told() -> None:
    agents = Agents(state_of(spike="act"))
    assert agents.steps([row(step, loss=2 + step % 2 / 100) for step in range(1, 40)]) == []
    (norm,) = agents.steps([replace(row(40), grad_norm=1000.0)])
    (loss,) = agents.steps([row(41, loss=9.0)])
    assert isinstance(norm, Detected)
    assert isinstance(loss, Detected)
    assert (norm.cause, norm.acts, norm.step) == (Cause.SPIKE, False, 40)
    assert (loss.cause, loss.acts, loss.step) == (Cause.SPIKE, True, 41)
    assert loss.detail.startswith("step 41: loss 9, 4.5 times the median")


@pytest.mark.parametrize("cause", ["non_finite", "spike"])
def test_odd_steps_are_not_told_where_that_is_switched_off(cause: str) -> None:
    agents = Agents(state_of(**{cause: "off"}))
    steps = [row(step) for step in range(1, 40)]
    odd = row(40, loss=math.nan if cause == "non_finite" else 9.0)
    assert agents.steps([*steps, odd]) == []


def test_figures_of_older_attempts_are_left_out() -> None:
    agents = Agents(state_of())
    assert agents.steps([row(2, loss=math.nan, attempt=0)]) == []


def use(work_s: float, data_s: float = 0.0) -> agents_pb2.RankUse:
    split = common_pb2.StepSplit(forward_s=work_s / 3, backward_s=work_s * 2 / 3, data_s=data_s)
    return agents_pb2.RankUse(split=split)


def windows(agents: Agents, count: int, uses: tuple[agents_pb2.RankUse, ...]) -> list[Event]:
    """What so many windows of heartbeats make of what ranks use in a step."""
    events: list[Event] = []
    for number in range(count * WINDOW_SAMPLES + 1):
        now_s = number * WINDOW_S / WINDOW_SAMPLES
        for rank, used in enumerate(uses):
            events += agents.found(beat(rank, use=used), now_s)
    return events


@pytest.mark.parametrize(("mode", "acts"), [("log", False), ("act", True)])
def test_a_straggler_is_told_with_its_node(mode: str, acts: bool) -> None:
    agents = Agents(state_of(straggler=mode))
    (found,) = windows(agents, 4, (use(0.1), use(0.3)))
    assert isinstance(found, Detected)
    assert (found.cause, found.node, found.rank) == (Cause.STRAGGLER, NODES[1], 1)
    assert found.acts is acts
    assert "3.00 times the 0.1 s of its equals (limit 1.5" in found.detail


def test_ranks_that_wait_for_data_are_told() -> None:
    agents = Agents(state_of(straggler="off"))
    found = windows(agents, 4, (use(0.1), use(0.1, data_s=0.4)))
    assert [(event.cause, event.rank) for event in found if isinstance(event, Detected)] == [
        (Cause.DATA_STALL, 1)
    ]


def test_what_is_switched_off_is_not_told() -> None:
    agents = Agents(state_of(straggler="off", data_stall="off"))
    assert windows(agents, 4, (use(0.1), use(0.3, data_s=0.9))) == []


def test_a_node_s_own_trouble_goes_to_the_job_on_it() -> None:
    agents = Agents(state_of(kernel_log="act"))
    xid = host_event("kernel_log", message="an XID")
    (found,) = agents.host(NODES[0], xid)
    assert isinstance(found, Detected)
    assert (found.cause, found.node, found.detail) == (Cause.KERNEL_LOG, NODES[0], "n1: an XID")
    assert found.acts
    well = host_event("disk", what="data")
    assert [type(event) for event in agents.host(NODES[0], well)] == [DetectionEnded]
    assert agents.host(NodeId("elsewhere"), xid) == []
    (found,) = agents.host(NODES[0], host_event("traffic", message="eth1 has nearly stopped"))
    assert isinstance(found, Detected)
    # Logged, unless the job says otherwise.
    assert (found.cause, found.acts) == (Cause.TRAFFIC, False)
    assert agents.host(NODES[0], host_event("new", message="x")) == []


@pytest.mark.parametrize("cause", [Cause.DISK, Cause.HOST_MEMORY, Cause.TRAFFIC])
@pytest.mark.parametrize(("mode", "acts"), [("off", []), ("log", [False]), ("act", [True])])
def test_a_node_s_memory_disks_and_links_have_every_mode(
    cause: Cause, mode: str, acts: list[bool]
) -> None:
    agents = Agents(state_of(**{cause: mode}))
    found = agents.host(NODES[0], host_event(cause, message="nearly full"))
    assert [each.acts for each in found if isinstance(each, Detected)] == acts


def closed(node: NodeId = NODES[0], *, is_broken: bool = True, reason: str = "") -> NodeClosed:
    return NodeClosed(node=node, reason=reason or "GPUMissing=True", is_broken=is_broken)


@pytest.mark.parametrize(("mode", "acts"), [("off", []), ("log", [False]), ("act", [True])])
def test_a_host_that_is_called_broken_is_told_to_the_job_on_it(mode: str, acts: list[bool]) -> None:
    agents = Agents(state_of(node_condition=mode))
    found = agents.closed(closed(), 5.0)
    assert [each.acts for each in found if isinstance(each, Detected)] == acts
    told_of = [(each.cause, each.node, each.detail) for each in told(found, Detected)]  # type: ignore[union-attr]
    assert told_of == [(Cause.NODE_CONDITION, NODES[0], "n1: GPUMissing=True")] * len(acts)
    assert agents.closed(closed(NodeId("elsewhere")), 5.0) == []
    (over,) = agents.closed(closed(is_broken=False, reason="cordoned"), 6.0)
    assert isinstance(over, DetectionEnded)


def test_an_attempt_on_a_host_that_is_broken_is_told_of_it_too() -> None:
    state = state_of()
    agents = Agents(state)
    assert len(agents.closed(closed(), 5.0)) == 1
    assert len(told(agents.found(beat(0), 6.0), Detected)) == 1
    assert told(agents.found(beat(0), 7.0), Detected) == []
    state.jobs[JOB] = replace(state.jobs[JOB], attempt=Attempt(2))
    assert len(told(agents.found(beat(0, attempt=2), 8.0), Detected)) == 1
    # Steps may be told before any heartbeat.
    state.jobs[JOB] = replace(state.jobs[JOB], attempt=Attempt(3))
    agents.steps([row(1, attempt=3)])
    assert len(told(agents.found(beat(0, attempt=3), 8.5), Detected)) == 1
    agents.closed(closed(is_broken=False), 9.0)
    state.jobs[JOB] = replace(state.jobs[JOB], attempt=Attempt(4))
    assert told(agents.found(beat(0, attempt=4), 10.0), Detected) == []


@pytest.mark.parametrize(
    ("state", "num_found"),
    [(JobState.STARTING, 1), (JobState.RUNNING, 1), (JobState.SUSPENDING, 0), (JobState.PAUSED, 0)],
)
def test_hosts_and_lines_of_workers_are_heard_while_workers_live(
    state: JobState, num_found: int
) -> None:
    known = state_of()
    known.jobs[JOB] = replace(known.jobs[JOB], state=state)
    line = host_event("storage", message="a start waits for checkpoint storage")
    found = Agents(known).host(NODES[0], line)
    assert [event.cause for event in found] == [Cause.STORAGE] * num_found


def test_a_line_of_a_worker_is_told_of_its_own_attempt_and_acted_on_where_it_blames_the_node() -> (
    None
):
    agents = Agents(state_of(worker_log="act"))

    def acts(attempt: int, **fields: Any) -> list[bool]:
        event = host_event("worker_log", message="rank 1: ECC", **fields)
        event.job_id, event.attempt = JOB, attempt
        return [found.acts for found in agents.host(NODES[0], event)]

    assert acts(1) == [True]
    assert acts(1, spares_node=True) == [False]
    assert acts(0) == []


def test_damaged_host_memory_is_told_whatever_its_job_does_and_whatever_the_spec_says() -> None:
    state = state_of()
    state.jobs[JOB] = replace(state.jobs[JOB], state=JobState.SUSPENDING)
    agents = Agents(state)
    message = "step 9, host memory, slot 1 of rank 3: bytes 0 to 64 do not fit their checksum"
    event = host_event("silent_corruption", what="rank 3", message=message)
    assert agents.host(NODES[1], event) == []
    event.job_id = JOB
    (found,) = told(agents.host(NODES[1], event), Detected)
    assert isinstance(found, Detected)
    assert (found.cause, found.node, found.rank) == (Cause.SILENT_CORRUPTION, NODES[1], 3)
    assert found.detail == f"{NODES[1]}: {message}"


def host_event(subject: str, **fields: Any) -> agents_pb2.AgentEvent:
    return agents_pb2.AgentEvent(at_s=5.0, host_sign=agents_pb2.HostSign(subject=subject, **fields))


def test_nothing_is_looked_for_while_a_job_does_not_train() -> None:
    state = state_of()
    state.jobs[JOB] = replace(state.jobs[JOB], state=JobState.STARTING)
    agents = Agents(state)
    assert windows(agents, 4, (use(0.1), use(0.3))) == []
    assert agents.steps([row(1, loss=math.nan)]) == []


def test_a_bare_off_in_yaml_is_off() -> None:
    spec = parse_spec(spec_document(detectors={"straggler": False}))
    assert spec.detectors.straggler == "off"


def test_an_attempt_that_is_slower_than_the_one_before_is_a_slowdown() -> None:
    state = state_of()
    agents = Agents(state)

    def minutes(count: int, duration_s: float, attempt: int) -> list[Event]:
        steps = range(count * math.ceil(60 / duration_s))
        rows = [replace(row(1, attempt=attempt), duration_s=duration_s) for _ in steps]
        return agents.steps(rows)

    assert minutes(5, 1.0, attempt=1) == []
    state.jobs[JOB] = replace(state.jobs[JOB], state=JobState.STARTING)
    assert agents.steps([]) == []
    state.jobs[JOB] = replace(state.jobs[JOB], state=JobState.RUNNING, attempt=Attempt(2))
    (event,) = told(minutes(4, 1.5, attempt=2), Detected)
    assert isinstance(event, Detected)
    assert event.cause is Cause.SLOWDOWN
    assert "1.50 times the 1 s of the job's best window" in event.detail
