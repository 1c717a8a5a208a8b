"""A person lets a paused job begin anew, or go on from a checkpoint that they chose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.changes import JobPut
from controller.core.codec import decode_change, encode_change
from controller.core.kinds import Action
from controller.core.node_events import NodeCordonRequested
from controller.core.orders import StartWorkers
from controller.core.states import JobState
from outlast.chosen import ChosenStart
from tests.controller.core.driver import JOB, Driver
from tests.controller.core.test_unloadable import DETAIL


def paused(committed: int = 60) -> Driver:
    """A job that was paused at attempt 1 with a committed checkpoint."""
    driver = Driver().running(spares=0)
    driver.commit(committed)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PAUSED
    return driver


def choose(driver: Driver, step: int = 0, **changes: object) -> ChosenStart:
    values: dict[str, object] = {"step": step, "attempt": driver.attempt(), **changes}
    chosen = ChosenStart(**values)  # type: ignore[arg-type]  # a test's keywords
    driver.send(ev.JobResumeRequested(job_id=JOB, chosen=chosen))
    driver.answer_all("/suite/")
    return chosen


@pytest.mark.parametrize(("step", "committed"), [(0, None), (40, 40)])
def test_the_next_attempt_is_told_where_to_go_on(step: int, committed: int | None) -> None:
    driver = paused()
    chosen = choose(driver, step)
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.STARTING, 2)
    assert (job.chosen, job.committed_step) == ((chosen,), committed)
    attempt = driver.machine.state.attempts[JOB]
    assert attempt.chosen == (chosen,)
    assert attempt.committed_step == (-1 if committed is None else committed)
    assert any(
        isinstance(record.command, StartWorkers)
        for record in driver.machine.state.commands.values()
    )


def test_the_reason_says_what_the_user_chose() -> None:
    driver = paused()
    driver.lose("n1")
    choose(driver, 40)
    reasons = driver.job().reason
    assert driver.job().state is JobState.QUEUED or "resumed" in reasons
    assert str(driver.job().chosen[-1]) == "from checkpoint 40"


def test_a_commit_of_the_history_that_is_over_does_not_count() -> None:
    driver = paused()
    choose(driver)
    driver.answer_all("/start/")
    driver.advanced(1)
    late = ev.CheckpointCommitted(job_id=JOB, step=80, attempt=2, saved_by=1)
    driver.send(late)
    assert driver.job().committed_step is None
    driver.send(ev.CheckpointCommitted(job_id=JOB, step=20, attempt=2, saved_by=2))
    assert driver.job().committed_step == 20


def test_a_choice_for_another_attempt_or_of_a_running_job_changes_nothing() -> None:
    driver = paused()
    driver.send(ev.JobResumeRequested(job_id=JOB, chosen=ChosenStart(step=0, attempt=7)))
    assert driver.job().state is JobState.PAUSED
    assert driver.job().chosen == ()
    driver = Driver().running(spares=0)
    driver.commit(60)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    assert driver.job().state is JobState.SUSPENDING
    driver.send(ev.JobResumeRequested(job_id=JOB, chosen=ChosenStart(step=0, attempt=1)))
    assert (driver.job().chosen, driver.job().committed_step) == ((), 60)


def test_a_second_choice_before_a_start_takes_the_place_of_the_first() -> None:
    driver = paused()
    driver.send(NodeCordonRequested(node=driver.job().nodes[0] or driver.job().held_by[0]))
    first = ChosenStart(step=0, attempt=driver.attempt())
    driver.send(ev.JobResumeRequested(job_id=JOB, chosen=first))
    assert driver.job().state is JobState.QUEUED
    driver.send(ev.JobPauseRequested(job_id=JOB))
    second = choose(driver, 40)
    assert driver.job().chosen == (second,)
    assert driver.job().committed_step == 40


def test_a_choice_that_could_not_be_loaded_is_called_off_by_the_next() -> None:
    driver = paused()
    choose(driver, url="file:///of-another-model")
    driver.answer_all("/start/")
    values = {"code": 1, "fault_class": "checkpoint", "fingerprint": "c0", "completed_step": -1}
    driver.send(driver.exited(0, **{**values, "detail": DETAIL}))
    driver.answer_all("/stop/")
    assert (driver.job().state, driver.attempt()) == (JobState.PAUSED, 2)
    second = choose(driver, 60)
    assert driver.job().chosen == (second,)
    driver.answer_all("/start/")
    driver.advanced(61, resumed_step=60)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    third = choose(driver)
    assert driver.job().chosen == (second, third)


def test_a_job_without_a_choice_is_resumed_as_before() -> None:
    driver = paused()
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    assert driver.job().committed_step == 60
    assert driver.machine.state.attempts[JOB].chosen == ()


def test_damage_is_tried_once_for_each_time_that_a_person_resumes() -> None:
    """The same bytes give the same failure: only a person may bring new evidence."""
    driver = Driver().running(spares=1)
    driver.commit(40)
    driver.send(driver.exited(0, completed_step=45))
    values = {"code": 1, "fault_class": "checkpoint", "fingerprint": "c0", "completed_step": -1}
    for attempt in (2, 3, 4):
        driver.answer_all("/stop/")
        driver.answer_all("/suite/")
        driver.answer_all("/start/")
        assert driver.attempt() == attempt
        driver.send(driver.exited(0, **{**values, "detail": DETAIL}))
        driver.answer_all("/stop/")
        assert (driver.job().state, driver.attempt()) == (JobState.PAUSED, attempt)
        assert driver.incident(attempt).action is Action.PAUSE
        assert "`--from-scratch`" in driver.job().reason
        driver.wait(100_000.0)
        assert (driver.job().state, driver.attempt()) == (JobState.PAUSED, attempt)
        driver.send(ev.JobResumeRequested(job_id=JOB))
    assert driver.job().state is not JobState.FAILED


def test_an_older_journal_has_no_choices_and_a_new_one_keeps_them() -> None:
    driver = paused()
    choose(driver, 40, url="s3://bucket/other", url_step=7)
    written = encode_change(JobPut(job=driver.job()))
    assert decode_change(written) == JobPut(job=driver.job())
    assert isinstance(written, dict)
    assert isinstance(written["job"], dict)
    del written["job"]["chosen"]
    read = decode_change(written)
    assert isinstance(read, JobPut)
    assert read.job.chosen == ()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    commits=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), max_size=8),
)
def test_what_is_committed_is_never_of_a_history_that_is_over(
    steps: list[int], commits: list[tuple[int, int]]
) -> None:
    driver = paused(committed=90)
    for step in steps:
        before = driver.attempt()
        choose(driver, step)
        driver.answer_all("/start/")
        driver.advanced(step + 1, resumed_step=step)
        for at, saved_by in commits:
            saver = min(saved_by, driver.attempt())
            event = ev.CheckpointCommitted(
                job_id=JOB, step=at, attempt=driver.attempt(), saved_by=saver
            )
            had = driver.job().committed_step or 0
            driver.send(event)
            has = driver.job().committed_step or 0
            assert has == (max(had, at) if saver > before or at <= step else had)
        driver.send(ev.JobPauseRequested(job_id=JOB))
        driver.answer_all("/stop/")
        assert driver.job().state is JobState.PAUSED
