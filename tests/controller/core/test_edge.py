"""The edge says when it must be woken, and finds then what nobody told it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.changes import JobPruned, JobPut, NodeForgotten, NodePut, State
from controller.core.edge.due import DueQueue
from controller.core.edge.edge import Edge
from controller.core.edge.hangs import HangTable
from controller.core.edge.settings import JobSettings, SettingsTable
from controller.core.events import Event, JobAdvanced, JobStalled
from controller.core.node_events import NodeHeard, NodeLate
from controller.core.records import JobRecord
from controller.core.states import JobState
from outlast.ids import Attempt, NodeId
from outlast.layout import Layout
from outlast.v1 import agents_pb2
from tests.controller.core.driver import JOB, Driver
from tests.controller.judged import judged

N1, N2 = NodeId("n1"), NodeId("n2")
LAYOUT = Layout(tp=1, pp=1, dp=2)


def _settings(job: JobRecord) -> JobSettings:
    return JobSettings(layout=LAYOUT, hang_timeout_s=300.0, heartbeat_period_s=2.0)


class _Training:
    """A job that runs on two nodes, and a controller that has just started."""

    def __init__(self) -> None:
        self.state: State = Driver().running().machine.state
        self.edge = Edge(self.state, _settings)
        self.edge.expect_known(0.0)

    @property
    def job(self) -> JobRecord:
        return self.state.jobs[JOB]

    def put(self, **changes: object) -> None:
        """The machine has decided something about the job."""
        change = JobPut(job=replace(self.job, **changes))  # type: ignore[arg-type]
        self.state.apply(change)
        self.edge.refresh([change], 0.0)

    def beat(self, node: NodeId, step: int, now_s: float) -> list[Event]:
        summary = agents_pb2.RankSummary(
            job_id=JOB,
            attempt=self.job.attempt,
            rank=self.job.nodes.index(node),
            phase="forward",
            completed_step=step,
        )
        beat = agents_pb2.Heartbeat(at_s=now_s, ranks=[summary])
        return self.edge.handle(node, agents_pb2.AgentMessage(heartbeat=beat), now_s)

    def all_beat(self, step: int, now_s: float) -> None:
        for node in self.state.nodes:
            if node in self.job.nodes:
                self.beat(node, step, now_s)
            else:
                self.edge.heard(node, now_s)

    def stalls(self, now_s: float, wall_s: float = 0.0) -> list[JobStalled]:
        assert not any(isinstance(found, JobStalled) for found in self.edge.wake(now_s, wall_s))
        return [event for event in judged(self.edge) if isinstance(event, JobStalled)]


def test_wake_at_is_when_a_node_would_be_late() -> None:
    training = _Training()
    assert training.edge.wake_at(0.0, 0.0) == 6.0
    training.edge.heard(N1, 3.0)
    late = [event.node for event in training.edge.wake(6.0, 0.0) if isinstance(event, NodeLate)]
    assert N1 not in late
    assert len(late) == len(training.state.nodes) - 1
    assert training.edge.wake_at(6.0, 0.0) == 9.0
    assert training.edge.handle(N2, agents_pb2.AgentMessage(), 7.0) == [NodeHeard(node=N2)]


def test_a_stall_is_found_at_its_limit_and_again_after_a_step() -> None:
    training = _Training()
    training.all_beat(5, 100.0)
    for second in range(102, 400, 2):
        training.all_beat(5, float(second))
        assert training.stalls(float(second)) == []
    (stall,) = training.stalls(400.0)
    assert stall.stalled_s == 300.0
    assert stall.limit == "recovery.hang_timeout_s is 300 s"
    assert training.stalls(1000.0) == []
    training.all_beat(6, 1001.0)
    assert training.stalls(1300.9) == []
    assert len(training.stalls(1301.0)) == 1


def test_a_step_that_a_rare_heartbeat_brings_is_awaited_so_much_longer() -> None:
    training = _Training()
    training.edge = Edge(
        training.state,
        lambda job: replace(_settings(job), hang_timeout_s=10.0, heartbeat_period_s=60.0),
    )
    training.edge.expect_known(0.0)
    # A step every 5 s is heard of once a minute.
    for minute in range(1, 10):
        assert training.stalls(60.0 * minute) == []
        training.all_beat(12 * minute, 60.0 * minute)
    (stall,) = training.stalls(540.0 + 68.0)
    assert stall.stalled_s == 68.0


def test_heartbeats_alone_say_how_far_a_running_job_is() -> None:
    """Agents report a first step, and the next ones only here."""
    training = _Training()
    training.put(high_step=7)
    for step in range(1, 7):
        training.all_beat(step, 2.0 * step)
    assert training.beat(N1, 7, 14.0) == []
    (advanced,) = training.beat(N2, 7, 14.5)
    assert isinstance(advanced, JobAdvanced)
    assert (advanced.completed_step, advanced.resumed_step) == (7, 0)


def test_a_job_of_which_nobody_says_a_word_hangs_too() -> None:
    training = _Training()
    assert training.stalls(299.0) == []
    assert len(training.stalls(300.0)) == 1


def test_a_job_is_only_looked_at_when_something_is_due() -> None:
    """A turn of the loop goes through no list of jobs."""
    looked_at: list[str] = []

    def counting(job: JobRecord) -> JobSettings:
        looked_at.append(job.job_id)
        return _settings(job)

    state = Driver().running().machine.state
    edge = Edge(state, counting)
    edge.expect_known(0.0)
    assert list(edge.wake(5.0, 0.0)) == []
    # Once for its text, however often it is needed.
    assert looked_at == [JOB]


def test_a_start_that_gets_more_time_is_not_told_before_that_is_over() -> None:
    training = _Training()
    training.put(state=JobState.STARTING, attempt=Attempt(2), deadline_s=100.0)
    training.put(deadline_s=500.0)
    assert training.stalls(50.0, wall_s=99.5) == []
    (stall,) = training.stalls(60.0, wall_s=499.0)
    assert stall.attempt == 2
    assert stall.limit == "recovery.first_step_timeout_s is 1800 s"
    assert training.stalls(61.0, wall_s=500.0) == []


def test_a_job_that_has_ended_is_waited_for_no_more() -> None:
    training = _Training()
    training.put(state=JobState.SUCCEEDED)
    assert training.stalls(1000.0) == []


def test_a_queue_gives_each_key_once_and_at_the_earliest_moment_wanted() -> None:
    queue: DueQueue[str] = DueQueue()
    queue.put("a", 5.0)
    queue.put("b", 3.0)
    queue.put("a", 2.0)
    queue.put("a", 9.0)
    queue.put("c", 3.0)
    queue.forget("c")
    assert queue.next_s() == 2.0
    assert list(queue.take(4.0)) == ["a", "b"]
    assert queue.next_s() is None
    queue.put("a", 9.0)
    assert list(queue.take(8.9)) == []
    assert list(queue.take(9.0)) == ["a"]


def test_what_came_before_a_mistake_with_one_job_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a mistake of ours")

    training = _Training()
    monkeypatch.setattr(HangTable, "stalled", fail)
    found: list[Event] = []
    with pytest.raises(ValueError, match="of ours"):
        found.extend(training.edge.wake(300.0, 0.0))
    late = [event.node for event in found if isinstance(event, NodeLate)]
    assert late == list(training.state.nodes)


def test_what_is_forgotten_in_the_turn_in_which_it_changed_is_expected_no_more() -> None:
    training = _Training()
    node, job = training.state.nodes[N1], training.job
    changes = [NodePut(node=node), JobPut(job=replace(job, state=JobState.FAILED))]
    gone = [NodeForgotten(node=N1), JobPruned(job_id=JOB, incidents=())]
    for change in (*changes, *gone):
        training.state.apply(change)
    assert training.edge.refresh([*changes, *gone], 0.0) == [N1]
    assert training.edge.heard_s(N1) is None
    assert training.stalls(1000.0) == []


def test_settings_of_a_job_are_not_kept_again_after_its_end() -> None:
    """A message about a job may come after its end, when nothing forgets it any more."""
    asked: list[JobState] = []

    def settings_of(job: JobRecord) -> JobSettings:
        asked.append(job.state)
        return JobSettings(layout=Layout(dp=2))

    job = Driver().running().job()
    table = SettingsTable(settings_of)
    assert table.of(job) is table.of(job)
    table.forget(job.job_id)
    ended = replace(job, state=JobState.SUCCEEDED)
    for _ in range(2):
        assert table.of(ended) == table.of(job)
    # Those of the ended one were made for each message, and what is kept is the live one's.
    assert asked == [JobState.RUNNING, JobState.SUCCEEDED, JobState.RUNNING, JobState.SUCCEEDED]
