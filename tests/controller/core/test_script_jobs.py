"""Jobs that run a script: done when every rank is, and judged by time where steps are not known."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.kinds import Action, Cause, Rung
from controller.core.states import JobState
from controller.core.verdict import EARLY_S, STEADY_S
from tests.controller.core.driver import JOB, Driver


def started(**changes: object) -> Driver:
    """A script that runs on both nodes and has said nothing of its steps."""
    driver = Driver().starting(spares=0, **{"total_steps": None, **changes})
    driver.answer_all("/start/")
    driver.advanced(0, resumed_step=-1)
    return driver


def fail(driver: Driver, after_s: float, **changes: object) -> None:
    values: dict[str, object] = {
        "code": 1,
        "fault_class": "user_error",
        "fingerprint": "f00d",
        "detail": "RuntimeError: no",
        "completed_step": -1,
    }
    driver.now_s += after_s
    driver.send(driver.exited(1, **{**values, **changes}))
    driver.answer_all("/stop/")
    if driver.job().state is JobState.DIAGNOSING:
        driver.searched(search=f"{driver.job().incident}.d1")
    if driver.job().state is JobState.STARTING:
        driver.answer_all("/start/")
        driver.advanced(0, resumed_step=-1)


def test_a_script_runs_as_soon_as_its_ranks_do_and_says_nothing_of_steps() -> None:
    job = started().job()
    assert (job.state, job.reason) == (JobState.RUNNING, "its script runs on all 2 ranks")


def test_a_script_that_reports_steps_is_said_to_train() -> None:
    driver = Driver().starting(spares=0, total_steps=None)
    driver.answer_all("/start/")
    driver.advanced(5, resumed_step=4)
    assert driver.job().reason == "training since step 5"


@pytest.mark.parametrize("is_running", [True, False])
def test_a_script_has_succeeded_when_every_rank_ended_with_exit_code_0(is_running: bool) -> None:
    driver = Driver().starting(spares=0, total_steps=None)
    if is_running:
        driver.advanced(0, resumed_step=-1)
    driver.send(driver.exited(0, code=0, completed_step=-1))
    assert driver.job().state in (JobState.STARTING, JobState.RUNNING)
    driver.send(driver.exited(1, code=0, completed_step=7))
    job = driver.job()
    assert (job.state, job.reason) == (JobState.SUCCEEDED, "every rank ended with exit code 0")


def test_a_rank_that_ends_with_exit_code_0_because_it_was_asked_to_is_not_done() -> None:
    driver = started()
    driver.send(ev.JobPauseRequested(job_id=JOB))
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=-1, stopped=True))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PAUSED


def test_what_a_script_raises_early_of_its_own_ends_the_job_at_once() -> None:
    driver = started()
    fail(driver, EARLY_S / 2, fault_class="program_error", detail="ValueError: lr")
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.reason == (
        "the job's own program failed after 30 s, on rank 1: ValueError: lr; it would fail again, "
        "so it is not retried"
    )
    assert driver.incident().cause is Cause.USER_ERROR


@pytest.mark.parametrize(
    ("fault_class", "after_s"), [("program_error", 2 * EARLY_S), ("user_error", 1.0)]
)
def test_another_error_is_tried_once_more_and_ends_the_job_if_it_comes_again(
    fault_class: str, after_s: float
) -> None:
    driver = started()
    fail(driver, after_s, fault_class=fault_class)
    assert (driver.job().state, driver.attempt()) == (JobState.RUNNING, 2)
    fail(driver, after_s, fault_class=fault_class)
    assert driver.job().state is JobState.FAILED
    assert f"failed in the same way 2 times after {after_s:.0f} s" in driver.job().reason


def test_an_error_that_comes_again_after_a_long_run_is_another_matter_of_the_moment() -> None:
    driver = started()
    for _ in range(3):
        fail(driver, STEADY_S)
        assert driver.job().state is JobState.RUNNING


def test_the_same_error_after_each_long_run_ends_with_the_retry_budget() -> None:
    driver = started(retry_budget=3)
    for _ in range(4):
        assert driver.job().state is JobState.RUNNING
        fail(driver, STEADY_S)
    assert driver.job().state is JobState.FAILED
    assert "the retry budget is spent" in driver.job().reason


def test_a_long_run_puts_other_faults_behind_a_script() -> None:
    driver = started(retry_budget=3)
    for number in range(8):
        fail(driver, STEADY_S, code=-9, fault_class="killed_by_signal", fingerprint=f"{number}")
        assert driver.job().state is JobState.RUNNING
        assert driver.job().retry_left == 2


def test_short_runs_do_not() -> None:
    driver = started(retry_budget=2)
    for number in range(3):
        assert driver.job().state is JobState.RUNNING
        fail(driver, 1.0, code=-9, fault_class="killed_by_signal", fingerprint=f"{number}")
    assert driver.job().state is JobState.FAILED


def test_an_incident_ends_when_the_script_runs_again() -> None:
    driver = started()
    fail(driver, 1.0, code=-9, fault_class="killed_by_signal", fingerprint="")
    incident = driver.incident()
    assert incident.action is Action.RESTART_IN_PLACE
    assert incident.timeline[-1].detail == "its script runs again"


def test_a_cancelled_script_may_clean_up() -> None:
    driver = started()
    driver.send(ev.JobCancelRequested(job_id=JOB))
    orders = [record.command for record in driver.machine.state.commands.values()]
    assert [getattr(order, "graceful", None) for order in orders] == [True, True]


@pytest.mark.parametrize("fault_class", ["program_error", "user_error", "missing"])
def test_all_errors_are_retried_within_the_budget_where_that_is_wanted(fault_class: str) -> None:
    driver = started(retry_budget=3, retry_program_errors=True, ladder=(Rung.RESTART,))
    for _ in range(4):
        assert driver.job().state is JobState.RUNNING
        fail(driver, 1.0, fault_class=fault_class)
    assert driver.job().state is JobState.FAILED
    assert "the retry budget is spent: 4 faults" in driver.job().reason


def test_the_first_fault_of_a_job_without_retries_says_what_happened() -> None:
    driver = started(retry_budget=0)
    fail(driver, 1.0, fault_class="unknown", fingerprint="", detail="exit code 7")
    assert driver.job().reason == "rank 1 on n2 failed: exit code 7; recovery.retry_budget is 0"


def test_nodes_are_not_checked_first_where_that_is_not_wanted() -> None:
    driver = Driver()
    driver.join("n1")
    driver.join("n2")
    driver.submit(total_steps=None, preflight=False)
    assert driver.job().state is JobState.STARTING


def test_an_exit_code_that_says_nothing_else_ends_the_job_the_third_time() -> None:
    driver = started()
    for _ in range(3):
        assert driver.job().state is JobState.RUNNING
        fail(driver, 1.0, code=7, fault_class="unknown", fingerprint="", detail="exit code 7")
    assert driver.job().state is JobState.FAILED
    assert "failed in the same way 3 times after 1 s: exit code 7" in driver.job().reason


@pytest.mark.parametrize(("ran_s", "state"), [(30.0, "FAILED"), (STEADY_S, "RUNNING")])
def test_silence_is_no_part_of_how_long_a_script_ran(ran_s: float, state: str) -> None:
    """One that falls silent again soon after its start is not restarted for ever."""
    driver = started(ladder=(Rung.RESTART,))
    for _ in range(2):
        assert driver.job().state is JobState.RUNNING
        driver.now_s += ran_s + STEADY_S
        driver.send(
            ev.JobStalled(
                job_id=JOB,
                attempt=driver.attempt(),
                stalled_s=STEADY_S,
                culprit_ranks=(),
                detail="ranks 0, 1 do not report operations",
                limit="recovery.hang_timeout_s is 600 s",
            )
        )
        driver.answer_all("/stop/")
        if driver.job().state is JobState.STARTING:
            driver.answer_all("/start/")
            driver.advanced(0, resumed_step=-1)
    assert driver.job().state.value == state, driver.job().reason
