"""What becomes of a judgement of a hang that takes a while: it is dropped when it is overtaken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from controller.core.changes import JobPut, RanksDone, State
from controller.core.edge.edge import BEFORE_DEADLINE_S, Edge
from controller.core.edge.judgement import HangJudgement, HangSign
from controller.core.edge.settings import JobSettings
from controller.core.events import Event, JobStalled
from controller.core.records import JobRecord
from controller.core.states import JobState
from outlast.ids import Attempt, NodeId
from outlast.layout import Layout
from outlast.v1 import agents_pb2
from tests.controller.core.driver import JOB, Driver

N1, N2 = NodeId("n1"), NodeId("n2")
OVER_S, LIMIT_S = 9.0, 1.8


class _Training:
    """A job of two nodes with a rank each, and an edge that hears them."""

    def __init__(self) -> None:
        self.state: State = Driver().running().machine.state
        settings = JobSettings(layout=Layout(dp=2), hang_timeout_s=300.0)
        self.edge = Edge(self.state, lambda _job: settings)
        self.edge.expect_known(0.0)

    @property
    def job(self) -> JobRecord:
        return self.state.jobs[JOB]

    def put(self, **changes: object) -> None:
        """The machine has decided something about the job."""
        change = JobPut(job=replace(self.job, **changes))  # type: ignore[arg-type]
        self.state.apply(change)
        self.edge.refresh([change], 0.0)

    def beat(
        self, node: NodeId, now_s: float, *, stalled_s: float, state: str = "S", step: int = 5
    ) -> None:
        summary = agents_pb2.RankSummary(
            job_id=JOB,
            attempt=self.job.attempt,
            rank=self.job.nodes.index(node),
            phase="gradient_sync",
            completed_step=step,
            process_state=state,
            stalled_s=stalled_s,
            stall_limit_s=LIMIT_S,
        )
        beat = agents_pb2.Heartbeat(at_s=now_s, ranks=[summary])
        self.edge.handle(node, agents_pb2.AgentMessage(heartbeat=beat), now_s)

    def all_beat(self, now_s: float, *, stalled_s: float, step: int = 5) -> None:
        for node in (N1, N2):
            self.beat(node, now_s, stalled_s=stalled_s, step=step)

    def judgement(self) -> HangJudgement:
        (judgement,) = self.edge.take_judgements()
        assert not self.edge.has_judgements
        return judgement

    def found(self, judgement: HangJudgement) -> list[Event]:
        return self.edge.judged(judgement, judgement.judge())


def _all_stand(training: _Training) -> HangJudgement:
    training.all_beat(10.0, stalled_s=OVER_S)
    return training.judgement()


def _is_stopped(training: _Training) -> HangJudgement:
    training.beat(N1, 10.0, stalled_s=0.0)
    training.beat(N2, 10.0, stalled_s=OVER_S, state="T")
    return training.judgement()


def _makes_no_step(training: _Training) -> HangJudgement:
    training.all_beat(10.0, stalled_s=0.0)
    assert not [each for each in training.edge.wake(310.0, 0.0) if isinstance(each, JobStalled)]
    return training.judgement()


def _starts_slowly(training: _Training) -> HangJudgement:
    training.put(state=JobState.STARTING, attempt=Attempt(2), deadline_s=100.0)
    list(training.edge.wake(60.0, 99.5))
    return training.judgement()


SIGNS = [_all_stand, _is_stopped, _makes_no_step, _starts_slowly]


@pytest.mark.parametrize("sign", SIGNS)
def test_an_answer_of_which_nothing_has_changed_is_the_machines_event(
    sign: Callable[[_Training], HangJudgement],
) -> None:
    training = _Training()
    judgement = sign(training)
    (event,) = training.found(judgement)
    assert isinstance(event, JobStalled)
    assert event.attempt == training.job.attempt
    # Told once, however often heartbeats say it.
    if sign in (_all_stand, _is_stopped):
        training.all_beat(12.0, stalled_s=OVER_S)
        assert not training.edge.has_judgements


@pytest.mark.parametrize("sign", SIGNS)
def test_an_answer_about_an_attempt_that_is_over_is_dropped(
    sign: Callable[[_Training], HangJudgement],
) -> None:
    training = _Training()
    judgement = sign(training)
    training.put(state=JobState.RUNNING, attempt=Attempt(training.job.attempt + 1))
    assert training.found(judgement) == []


@pytest.mark.parametrize("sign", SIGNS)
def test_an_answer_about_a_job_that_is_being_stopped_is_dropped(
    sign: Callable[[_Training], HangJudgement],
) -> None:
    training = _Training()
    judgement = sign(training)
    training.put(state=JobState.SUSPENDING)
    assert training.found(judgement) == []


@pytest.mark.parametrize("sign", [_all_stand, _is_stopped])
def test_ranks_that_move_meanwhile_do_not_hang_and_may_hang_again(
    sign: Callable[[_Training], HangJudgement],
) -> None:
    training = _Training()
    judgement = sign(training)
    training.beat(N2, 11.0, stalled_s=0.1)
    assert training.found(judgement) == []
    assert not training.edge.has_judgements
    assert len(training.found(sign(training))) == 1


def test_a_step_that_is_completed_meanwhile_ends_the_stall() -> None:
    training = _Training()
    judgement = _makes_no_step(training)
    training.all_beat(311.0, stalled_s=0.0, step=6)
    assert training.found(judgement) == []
    list(training.edge.wake(611.0, 0.0))
    assert len(training.found(training.judgement())) == 1


def test_a_start_that_gets_more_time_meanwhile_is_asked_about_again() -> None:
    training = _Training()
    judgement = _starts_slowly(training)
    training.put(deadline_s=500.0)
    assert training.found(judgement) == []
    list(training.edge.wake(61.0, 499.5))
    assert len(training.found(training.judgement())) == 1


def test_an_answer_that_could_not_be_worked_out_says_so_and_blames_nobody() -> None:
    training = _Training()
    judgement = _all_stand(training)
    (event,) = training.edge.judged(judgement, judgement.unexplained("a mistake of ours"))
    assert isinstance(event, JobStalled)
    assert (event.culprit_ranks, event.stalled_s) == ((), OVER_S)
    assert event.detail == "who holds it up is not known: a mistake of ours"


def test_the_question_about_a_large_start_comes_earlier() -> None:
    """The machine's patience ends at the deadline, with or without an answer."""
    training = _Training()
    plan = replace(training.job.plan, nodes=12_500, workers_per_node=8)
    training.put(state=JobState.STARTING, attempt=Attempt(2), deadline_s=100.0, plan=plan)
    due_s = training.edge.job_due_s(JOB)
    assert due_s is not None
    assert 100.0 - BEFORE_DEADLINE_S - 10.0 < due_s < 100.0 - BEFORE_DEADLINE_S - 3.0


@pytest.mark.parametrize("sign", [_all_stand, _is_stopped])
def test_ranks_that_moved_and_stand_again_are_judged_again(
    sign: Callable[[_Training], HangJudgement],
) -> None:
    """What was heard before they moved would blame the rank that held them up then."""
    training = _Training()
    judgement = sign(training)
    training.all_beat(12.0, stalled_s=0.0, step=6)
    training.all_beat(30.0, stalled_s=OVER_S / 2, step=6)
    training.beat(N2, 31.0, stalled_s=OVER_S / 2, state="T" if judgement.stopped else "S", step=6)
    assert training.found(judgement) == []
    training.all_beat(32.0, stalled_s=OVER_S, step=6)
    assert isinstance(training.found(training.judgement())[0], JobStalled)


def test_a_late_start_is_told_though_another_answer_was_awaited_when_its_moment_came() -> None:
    training = _Training()
    training.put(state=JobState.STARTING, attempt=Attempt(2), deadline_s=100.0)
    judgement = _all_stand(training)
    list(training.edge.wake(60.0, 99.5))
    assert not training.edge.has_judgements
    training.all_beat(61.0, stalled_s=0.0)
    assert training.found(judgement) == []
    list(training.edge.wake(62.0, 99.6))
    assert training.judgement().sign is HangSign.NO_FIRST_STEP


def test_ranks_that_stand_after_another_has_ended_well_hang() -> None:
    """They wait for one that has left them, and no heartbeat will ever tell of it again."""
    training = _Training()
    training.beat(N1, 9.0, stalled_s=0.0)
    training.state.apply(RanksDone(job_id=JOB, ranks=(0,)))
    training.beat(N2, 10.0, stalled_s=0.0)
    assert not training.edge.has_judgements
    training.beat(N2, 20.0, stalled_s=OVER_S)
    (event,) = training.found(training.judgement())
    assert isinstance(event, JobStalled)
    assert event.stalled_s == OVER_S
    assert "rank 0 ended with exit code 0" in event.stood
