"""Mistakes of the job's own program: a retry that could only repeat them is not made."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.kinds import Action, Cause, Rung
from controller.core.states import JobState, NodeState
from tests.controller.core.driver import JOB, Driver

DETAIL = "KeyError: 'text' (exception, class 'user_error', rule 'interpreter' of table 2)"


def fail(driver: Driver, **changes: object) -> None:
    values: dict[str, object] = {
        "code": 1,
        "fault_class": "user_error",
        "fingerprint": "f00d",
        "detail": DETAIL,
        "traceback": "Traceback: KeyError: 'text'",
        "completed_step": -1,
    }
    driver.send(driver.exited(1, **{**values, **changes}))
    driver.answer_all("/stop/")


def test_a_failed_job_has_the_exit_code_of_the_rank_that_failed_first() -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    assert driver.job().exit_code is None
    driver.send(driver.exited(0, code=1, fault_class="cascade", completed_step=-1))
    fail(driver, code=3)
    assert (driver.job().state, driver.job().exit_code) == (JobState.FAILED, 3)


@pytest.mark.parametrize("fault_class", ["program_error", "user_error"])
def test_an_error_before_the_first_step_fails_the_job_at_once_in_plain_words(
    fault_class: str,
) -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    fail(driver, fault_class=fault_class)
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.error == "Traceback: KeyError: 'text'"
    assert job.reason == (
        "the job's own program failed before the first step, on rank 1: KeyError: 'text'; it would "
        "fail again, so it is not retried"
    )
    assert driver.incident().cause is Cause.USER_ERROR
    assert "rule 'interpreter'" in driver.incident().evidence[0].detail, "for who looks into it"


def test_an_error_that_the_same_input_makes_again_fails_the_job_after_a_step_too() -> None:
    driver = Driver().running(spares=0)
    fail(driver, fault_class="program_error", completed_step=10)
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.error == "Traceback: KeyError: 'text'"
    assert job.reason == (
        "the job's own program failed after step 10, on rank 1: KeyError: 'text'; it would fail "
        "again, so it is not retried"
    )
    assert driver.incident().action is Action.FAIL


def test_an_error_in_steps_that_were_done_before_without_it_is_tried_again() -> None:
    """The same program was right on the same input: bits may have changed."""
    driver = Driver().running(spares=0)
    driver.send(driver.exited(0, completed_step=50))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    # The restart went on from step 40.
    fail(driver, fault_class="program_error", completed_step=45)
    assert driver.job().state is not JobState.FAILED


def test_an_error_on_a_node_with_an_earlier_fault_waits_for_the_checks_of_that_node() -> None:
    driver = Driver().running(spares=0)
    driver.send(driver.exited(1, completed_step=10))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    fail(driver, fault_class="program_error", completed_step=20)
    assert driver.job().state is JobState.DIAGNOSING
    driver.searched()
    assert driver.job().state is JobState.FAILED
    assert "checks of its nodes found nothing" in driver.job().reason


def test_an_error_of_the_moment_after_a_step_is_tried_once_more_and_told_without_the_table() -> (
    None
):
    driver = Driver().running(spares=0)
    fail(driver, completed_step=10)
    assert driver.incident().action is Action.RESTART_IN_PLACE
    driver.answer_all("/start/")
    fail(driver, completed_step=10)
    assert driver.job().state is JobState.FAILED
    reason = "rank 1 failed in the same way 2 times after step 10: KeyError: 'text'"
    assert driver.job().reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"fault_class": "unknown"},
        {"fault_class": "storage"},
        {"fault_class": "killed_by_signal", "fingerprint": ""},
    ],
)
def test_what_need_not_be_the_program_is_tried_again(changes: dict[str, object]) -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    fail(driver, **changes)
    assert driver.job().attempt == 2


def test_a_job_that_has_trained_before_is_tried_again_in_its_next_attempt() -> None:
    """What is new may be a node, not the program."""
    driver = Driver().running(spares=0)
    driver.send(driver.exited(0, completed_step=50))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    fail(driver)
    assert driver.job().state is JobState.DIAGNOSING


def test_a_failure_that_repeats_before_the_first_step_says_so_in_words() -> None:
    driver = Driver().starting(spares=0, ladder=(Rung.RESTART,))
    driver.answer_all("/start/")
    for _ in range(3):
        fail(driver, fault_class="unknown", detail="Error: x")
        driver.answer_all("/start/")
    reason = "rank 1 failed in the same way 3 times before the first step: Error: x"
    assert driver.job().reason == reason


@pytest.mark.parametrize("fault_class", ["device", "nccl"])
def test_what_a_device_says_of_itself_again_and_again_is_not_held_against_the_job(
    fault_class: str,
) -> None:
    driver = Driver().starting(spares=1, ladder=(Rung.RESTART, Rung.REPLACE))
    driver.answer_all("/start/")
    for _ in range(3):
        fail(driver, fault_class=fault_class, detail="CUDA error: uncorrectable ECC error")
        driver.answer_all("/start/")
    assert driver.job().state is not JobState.FAILED
    assert "in the same way" not in driver.job().reason


def early(driver: Driver, rank: int = 1, step: int = 10, **changes: object) -> None:
    driver.send(driver.exited(rank, code=0, fault_class="clean", completed_step=step, **changes))


def test_ranks_that_end_well_before_the_last_step_are_no_success() -> None:
    driver = Driver().running(spares=0)
    early(driver, 0)
    early(driver, 1)
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.STARTING
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.USER_ERROR, Action.RESTART_IN_PLACE)
    assert incident.culprits == ()
    assert "rank 0 on n1 failed: its process ended with exit code 0 after step 10 of 100" in (
        incident.reason
    )


def test_a_rank_that_ends_early_is_the_first_failure_and_those_that_lose_it_are_not() -> None:
    driver = Driver().running(spares=0)
    driver.send(driver.exited(0, code=1, fault_class="cascade", detail="connection closed"))
    early(driver, at_s=driver.now_s + 0.1)
    driver.answer_all("/stop/")
    assert driver.incident().culprits == ()
    assert driver.incident().cause is Cause.USER_ERROR
    assert "rank 1 on n2 failed" in driver.incident().reason


def test_a_program_that_ends_early_again_fails_the_job_and_no_node_is_checked() -> None:
    driver = Driver().running(spares=0)
    for _ in range(2):
        early(driver)
        driver.answer_all("/stop/")
        assert {driver.node(node).state for node in ("n1", "n2")} <= {
            NodeState.ASSIGNED,
            NodeState.READY,
        }
        driver.answer_all("/start/")
    assert driver.job().state is JobState.FAILED
    assert driver.job().reason.startswith("rank 1 failed in the same way 2 times after step 10")


@pytest.mark.parametrize("step", [-1, 0])
def test_a_program_that_ends_before_its_first_step_fails_the_job_at_once(step: int) -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    early(driver, step=step)
    driver.answer_all("/stop/")
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert "its process ended with exit code 0 before its first step of 100" in job.reason


def test_a_worker_that_was_stopped_and_ended_with_0_is_no_fault() -> None:
    driver = Driver().running(spares=0)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    early(driver, stopped=True)
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PAUSED
    assert driver.job().num_incidents == 0


def test_a_setting_that_cannot_be_met_fails_the_job_at_once_in_plain_words() -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    what = (
        "checkpoint.load: s3://b/other: checkpoint step 4 has no tensor w: it is of another model"
    )
    fail(
        driver,
        fault_class="config",
        detail=f"outlast.errors.SettingError: {what} (exception, class 'config', rule 'setting "
        "that cannot be met' of table 4)",
    )
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.reason == f"the job cannot start as it is written: {what}"
    assert job.error == what
    assert job.retry_left == job.plan.retry_budget
    assert (driver.incident().cause, driver.incident().culprits) == (Cause.CONFIG, ())


def late(driver: Driver, *culprits: int) -> None:
    driver.send(
        ev.JobStalled(
            job_id=JOB,
            attempt=driver.job().attempt,
            stalled_s=10.0,
            culprit_ranks=culprits,
            detail="no rank has failed",
            limit="recovery.first_step_timeout_s is 10 s",
        )
    )
    driver.answer_all("/stop/")


@pytest.mark.parametrize("culprits", [(), (1,)])
def test_two_starts_in_a_row_that_take_too_long_pause_the_job_and_name_the_limit(
    culprits: tuple[int, ...],
) -> None:
    driver = Driver().starting(
        spares=0, ladder=(Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE)
    )
    for _ in range(2):
        driver.answer_all("/start/")
        late(driver, *culprits)
    if culprits:
        assert driver.job().state is JobState.DIAGNOSING, "a node that holds it up comes first"
        driver.searched()
    job = driver.job()
    assert job.state is JobState.PAUSED
    assert job.attempt == 2
    assert "(recovery.first_step_timeout_s is 10 s)" in job.reason
    assert "raise recovery.first_step_timeout_s" in job.reason
    assert "retry_budget" not in job.reason
    assert driver.incident(2).culprits == ()


def test_a_late_start_after_progress_is_tried_again() -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    late(driver)
    driver.answer_all("/start/")
    driver.advanced(5)
    driver.send(driver.exited(0, completed_step=5))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    late(driver)
    assert driver.job().state is not JobState.PAUSED


def hang(driver: Driver, *culprits: int) -> None:
    driver.send(
        ev.JobStalled(
            job_id=JOB,
            attempt=driver.job().attempt,
            stalled_s=10.4,
            culprit_ranks=culprits,
            detail="all ranks compute",
            limit="recovery.hang_timeout_s is 10 s",
        )
    )
    driver.answer_all("/stop/")


# Each attempt does its first step, which has a limit of its own, and then is too slow again; an
# evaluation that takes too long comes at the same step each time.
@pytest.mark.parametrize("steps", [(5, 6), (5, 5)], ids=["a step further", "the same step"])
def test_steps_longer_than_the_limit_of_a_hang_pause_the_job_and_name_the_limit(
    steps: tuple[int, int],
) -> None:
    driver = hang_twice(steps)
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.PAUSED, 2)
    assert "two hangs in a row" in job.reason
    assert "(recovery.hang_timeout_s is 10 s)" in job.reason
    assert "raise recovery.hang_timeout_s" in job.reason
    assert "retry_budget" not in job.reason


@pytest.mark.parametrize("steps", [(5, 6), (5, 5)], ids=["a step further", "the same step"])
def test_a_rank_that_holds_the_others_up_again_is_tried_again_and_the_limit_named(
    steps: tuple[int, int],
) -> None:
    driver = hang_twice(steps, 1)
    assert driver.job().state is JobState.DIAGNOSING, "its node comes first"
    driver.searched()
    assert driver.job().state is JobState.STARTING
    assert "raise recovery.hang_timeout_s" in driver.incident(2).reason


def hang_twice(steps: tuple[int, int], *culprits: int) -> Driver:
    driver = Driver().starting(
        spares=0, ladder=(Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE)
    )
    for step in steps:
        driver.answer_all("/start/")
        driver.advanced(step)
        hang(driver, *culprits)
    return driver


def test_hangs_with_steps_between_them_are_no_limit_that_is_too_short() -> None:
    driver = Driver().starting(spares=0)
    for step in (5, 7, 9):
        driver.answer_all("/start/")
        driver.advanced(step)
        hang(driver)
    assert driver.job().state is not JobState.PAUSED
