"""What an agent reports of the progress of its attempts, and when."""

from __future__ import annotations

from controller.agent.core.reports import (
    START_LOOK_PERIOD_S,
    START_LOOK_S,
    STEP_REPORT_PERIOD_S,
    AttemptKey,
    Reports,
)

ATTEMPT = AttemptKey("job", 1)


def begun(now_s: float = 100.0) -> Reports:
    reports = Reports()
    reports.begin(ATTEMPT, now_s)
    return reports


def test_first_progress_is_due_at_once_and_heartbeats_say_the_next() -> None:
    reports = begun()
    assert reports.is_first_progress(ATTEMPT)
    assert reports.is_progress_due(ATTEMPT, 1)
    assert not reports.is_first_progress(ATTEMPT)
    assert not reports.is_progress_due(ATTEMPT, 2)
    assert not reports.is_progress_due(ATTEMPT, 999)


def test_progress_is_due_again_in_a_new_session_though_no_step_was_completed_since() -> None:
    reports = begun()
    assert reports.is_progress_due(ATTEMPT, 5)
    reports.welcomed()
    assert not reports.is_first_progress(ATTEMPT)
    assert reports.is_progress_due(ATTEMPT, 5)
    assert not reports.is_progress_due(ATTEMPT, 6)
    reports.welcomed()
    assert reports.is_progress_due(ATTEMPT, 6)


def test_last_progress_of_an_attempt_is_due_if_it_is_news() -> None:
    reports = begun()
    assert reports.is_progress_due(ATTEMPT, 1)
    assert not reports.is_progress_due(ATTEMPT, 1, is_last=True)
    assert reports.is_progress_due(ATTEMPT, 2, is_last=True)
    reports.end(ATTEMPT)
    assert not reports.is_progress_due(ATTEMPT, 3, is_last=True)


def test_steps_are_reported_a_few_times_a_second() -> None:
    reports = begun()
    assert reports.are_steps_due(ATTEMPT, 100.0)
    assert not reports.are_steps_due(ATTEMPT, 100.0 + STEP_REPORT_PERIOD_S / 2)
    assert reports.are_steps_due(ATTEMPT, 100.0 + STEP_REPORT_PERIOD_S)


def test_ranks_are_looked_at_often_while_the_first_step_is_awaited_but_not_for_ever() -> None:
    reports = begun()
    assert reports.look_period_s(101.0) == START_LOOK_PERIOD_S
    assert reports.look_period_s(100.0 + START_LOOK_S) == STEP_REPORT_PERIOD_S
    reports.begin(AttemptKey("other", 3), 140.0)
    assert reports.look_period_s(141.0) == START_LOOK_PERIOD_S
    assert reports.is_progress_due(AttemptKey("other", 3), 1)
    assert reports.look_period_s(141.0) == STEP_REPORT_PERIOD_S
