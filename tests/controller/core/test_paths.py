"""The main paths of a job, as whole lists of what the machine answers."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.kinds import Action, Cause, EvidenceKind, Rung
from controller.core.node_events import NodeDisconnected, NodeDrainRequested, NodeLate, NodeLost
from controller.core.states import IncidentState, JobState, NodeState
from outlast.ids import JobId, NodeId
from outlast.worker_contract import WorkerExitCode
from tests.controller.core.driver import JOB, Driver

RESTARTED = [
    "job.i1 VERDICT",
    "job.i1 ACTING",
    "n1 SUSPECT",
    "job RESTARTING a1",
    "job STARTING a2",
]


def test_a_job_goes_from_submission_to_success() -> None:
    driver = Driver()
    assert driver.join("n1") == ["n1 READY"]
    driver.join("n2")
    assert driver.submit() == [
        "job QUEUED a0",
        "job PROVISIONING a0",
        "n1 ASSIGNED",
        "n2 ASSIGNED",
        "job PREFLIGHT a0",
        "open n1/suite/1",
        "open n2/suite/1",
        "send n1/suite/1",
        "send n2/suite/1",
    ]
    assert driver.answer("n1/suite/1") == ["close n1/suite/1"]
    assert driver.answer("n2/suite/1") == [
        "close n2/suite/1",
        "job STARTING a1",
        "open job/a1/start/n1",
        "open job/a1/start/n2",
        "send job/a1/start/n1",
        "send job/a1/start/n2",
    ]
    assert driver.answer_all("/start/") == ["close job/a1/start/n1", "close job/a1/start/n2"]
    assert driver.advanced(1) == ["job RUNNING a1"]
    assert driver.send(driver.exited(0, code=0, completed_step=100)) == []
    assert driver.send(driver.exited(1, code=0, completed_step=100)) == [
        "job SUCCEEDED a1",
        "open job/forget/n1",
        "open job/forget/n2",
        "n1 READY",
        "n2 READY",
        "send job/forget/n1",
        "send job/forget/n2",
    ]
    assert driver.job().reason == "all 100 steps are done"


def test_a_killed_worker_restarts_in_place() -> None:
    driver = Driver().running()
    assert driver.send(driver.exited(0)) == [
        "job.i1 EVIDENCE",
        "job SUSPENDING a1",
        "open job/a1/stop/n1",
        "open job/a1/stop/n2",
        "send job/a1/stop/n1",
        "send job/a1/stop/n2",
    ]
    assert driver.answer("job/a1/stop/n1") == ["close job/a1/stop/n1"]
    assert driver.answer("job/a1/stop/n2", completed_step=11) == [
        "close job/a1/stop/n2",
        *RESTARTED,
        "open job/a2/start/n1",
        "open job/a2/start/n2",
        "send job/a2/start/n1",
        "send job/a2/start/n2",
    ]
    assert driver.incident().cause is Cause.WORKER_KILLED
    assert driver.incident().fault_step == 11
    driver.answer_all("/start/")
    assert driver.advanced(10, resumed_step=9) == ["job RUNNING a2", "job.i1 VERIFYING"]
    assert driver.advanced(11, resumed_step=9) == ["job.i1 CLOSED"]


def test_a_node_that_the_cluster_reports_gone_is_replaced_by_a_free_one() -> None:
    driver = Driver().running()
    assert driver.lose("n2") == [
        "n2 RETIRED",
        "job.i1 EVIDENCE",
        "job SUSPENDING a1",
        "open job/a1/stop/n1",
        "evict n2",
        "alert",
        "send job/a1/stop/n1",
    ]
    assert driver.answer("job/a1/stop/n1") == [
        "close job/a1/stop/n1",
        "job.i1 VERDICT",
        "job.i1 ACTING",
        "job REPAIRING a1",
        "n3 ASSIGNED",
        "job PROVISIONING a1",
        "job PREFLIGHT a1",
        "open n3/suite/1",
        "send n3/suite/1",
    ]
    driver.answer("n3/suite/1")
    # A node keeps its rank's place; the new one takes the lost one's.
    assert driver.job().nodes == ("n1", "n3")
    assert driver.job().attempt == 2


def test_a_standby_is_checked_beforehand_and_taken_first() -> None:
    driver = Driver().running(spares=2, standby=1)
    driver.answer_all("/suite/")
    assert driver.node("n3").state is NodeState.STANDBY
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().nodes == ("n3", "n2")


def test_without_a_spare_the_job_waits_and_says_for_what() -> None:
    driver = Driver().running(spares=0)
    driver.lose("n2")
    lines = driver.answer("job/a1/stop/n1")
    assert lines[-2:] == ["job PROVISIONING a1", "provision 1"]
    reason = driver.job().reason
    assert "waiting for 1 more node(s)" in reason
    assert "terminated" in reason
    assert driver.join("n9")[:3] == ["n9 READY", "n9 ASSIGNED", "job PREFLIGHT a1"]


def test_a_limit_below_a_second_is_not_called_0_s() -> None:
    driver = Driver().starting(first_step_timeout_s=0.2)
    driver.answer_all("/start/")
    driver.wait(0.3)
    assert any("no first step within 0.2 s" in each.detail for each in driver.incident().evidence)


def test_a_job_that_waits_says_which_jobs_have_the_nodes() -> None:
    driver = Driver().running(spares=0)
    other = JobId("other")
    driver.submit(other)
    reason = driver.job(other).reason
    assert "has 0 for its first start; job job has 2 node(s); it starts once enough are" in reason
    assert "`outlast agent`" in reason
    # What an ended job had is free again.
    driver.send(ev.JobCancelRequested(job_id=driver.job().job_id))
    driver.answer_all("/stop/")
    assert driver.job(other).state is JobState.PREFLIGHT
    driver.submit(JobId("third"))
    assert "job other has 2 node(s); it starts" in driver.job(JobId("third")).reason


def test_a_long_silence_alone_quarantines() -> None:
    driver = Driver().running()
    assert driver.lose("n2", gone=False)[:2] == ["job.i1 EVIDENCE", "job SUSPENDING a1"]
    assert "n2 QUARANTINED" in driver.answer("job/a1/stop/n1")
    assert driver.incident().cause is Cause.NODE_LOST
    assert driver.job().retry_left == 3, "losing hardware does not spend the retry budget"


def test_a_short_silence_needs_a_second_sign() -> None:
    driver = Driver().running()
    driver.send(NodeLate(node=NodeId("n2"), silent_s=6.0))
    assert driver.send(NodeLost(node=NodeId("n2"), silent_s=15.0)) == []
    driver.send(driver.exited(0, code=1, fault_class="cascade", detail="connection reset"))
    driver.send(NodeLost(node=NodeId("n2"), silent_s=16.0))
    driver.answer("job/a1/stop/n1")
    assert driver.node("n2").state is NodeState.QUARANTINED


def test_the_same_user_error_twice_fails_the_job_with_its_traceback() -> None:
    driver = Driver().running()
    for _ in range(2):
        driver.send(
            driver.exited(
                1,
                code=1,
                fault_class="user_error",
                fingerprint="f00d",
                detail="ValueError: x",
                traceback="Traceback: ValueError: x",
            )
        )
        lines = driver.answer_all("/stop/")
    assert lines[-10:] == [
        "close job/a2/stop/n2",
        "job.i2 VERDICT",
        "job.i2 CLOSED",
        "job FAILED a2",
        "open job/forget/n1",
        "open job/forget/n2",
        "n1 READY",
        "n2 READY",
        "send job/forget/n1",
        "send job/forget/n2",
    ]
    assert driver.job().error == "Traceback: ValueError: x"
    assert "ValueError: x" in driver.job().reason


def test_pause_stops_gracefully_and_resume_takes_the_same_nodes() -> None:
    driver = Driver().running()
    assert driver.send(ev.JobPauseRequested(job_id=JOB)) == [
        "job SUSPENDING a1",
        "open job/a1/stop/n1",
        "open job/a1/stop/n2",
        "send job/a1/stop/n1",
        "send job/a1/stop/n2",
    ]
    assert driver.answer_all("/stop/")[-3:] == ["job PAUSED a1", "n1 READY", "n2 READY"]
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    assert driver.job().nodes == ("n1", "n2")
    assert driver.job().state is JobState.STARTING


def test_drain_moves_the_job_away_without_quarantine_or_retry() -> None:
    driver = Driver().running()
    lines = driver.send(NodeDrainRequested(node=NodeId("n1")))
    assert lines[:3] == ["n1 DRAINING", "job.i1 EVIDENCE", "job SUSPENDING a1"]
    assert driver.answer_all("/stop/")[2:7] == [
        "job.i1 VERDICT",
        "job.i1 ACTING",
        "job REPAIRING a1",
        "n1 DRAINED",
        "n3 ASSIGNED",
    ]
    assert driver.node("n1").quarantines_s == ()
    assert driver.job().retry_left == 3


def test_an_ended_job_is_forgotten_by_every_node_that_ran_it() -> None:
    """n1 was drained and the job moved to n3; n2 is away at the end and comes back."""
    driver = Driver().running(spares=1)
    driver.send(NodeDrainRequested(node=NodeId("n1")))
    driver.answer_all("/stop/")
    driver.answer_all("/suite/")
    assert driver.job().held_by == ("n1", "n2", "n3")
    driver.send(NodeDisconnected(node=NodeId("n2")))
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer("job/a2/stop/n3")
    driver.join("n2")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.CANCELLED
    driver.answer("job/forget/n1")
    driver.answer("job/forget/n2", ok=False, detail="its uploads are still under way")
    driver.answer("job/forget/n3")
    assert driver.job().held_by == ("n2",)
    assert "send job/forget/n2" in driver.join("n2", incarnation="two")
    driver.answer("job/forget/n2")
    assert driver.job().held_by == ()
    assert "send job/forget/n2" not in driver.join("n2", incarnation="three")


def test_a_job_may_pause_instead_of_failing() -> None:
    ladder = (Rung.RESTART, Rung.PAUSE)
    driver = Driver().running(ladder=ladder, retry_budget=1, in_place_restarts=9)
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    driver.advanced(1)
    driver.send(driver.exited(0))
    lines = driver.answer_all("/stop/")
    job = driver.job()
    assert job.state is JobState.PAUSED
    assert "the retry budget is spent" in job.reason
    assert any("alert" in line for line in lines), lines
    driver.send(ev.JobResumeRequested(job_id=JOB))
    assert driver.job().retry_left == 1


@pytest.mark.parametrize("answer", [ev.JobResumeRequested, ev.JobCancelRequested])
def test_a_job_that_recovery_paused_needs_a_person_until_one_answers(
    answer: type[ev.JobResumeRequested | ev.JobCancelRequested],
) -> None:
    driver = Driver().running(ladder=(Rung.PAUSE,))
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    assert (driver.job().state, driver.job().needs_person) == (JobState.PAUSED, True)
    # A script that pauses whatever there is has not looked at it.
    driver.send(ev.JobPauseRequested(job_id=JOB))
    assert driver.job().needs_person
    driver.send(answer(job_id=JOB))
    assert not driver.job().needs_person


def test_a_job_that_a_person_paused_needs_none() -> None:
    driver = Driver().running()
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert (driver.job().state, driver.job().needs_person) == (JobState.PAUSED, False)


def test_workers_that_their_agent_stopped_by_itself_are_missing() -> None:
    driver = Driver().running()
    driver.send(driver.exited(0, code=WorkerExitCode.STOPPED, stopped=True))
    assert driver.job().state is JobState.SUSPENDING
    driver.send(driver.exited(1, code=WorkerExitCode.STOPPED, stopped=True))
    driver.answer_all("/stop/")
    (sign,) = driver.incident().evidence
    assert (sign.kind, sign.node) == (EvidenceKind.WORKERS_MISSING, "n1")
    assert driver.job().attempt == 2


def test_a_hang_points_at_the_culprits_node() -> None:
    driver = Driver().running()
    driver.send(
        ev.JobStalled(
            job_id=JOB,
            attempt=driver.job().attempt,
            stalled_s=300.0,
            culprit_ranks=(1,),
            detail="rank 1 is silent",
        )
    )
    driver.answer_all("/stop/")
    assert driver.incident().cause is Cause.HANG
    assert driver.node("n2").state is NodeState.SUSPECT
    assert driver.node("n1").state is NodeState.ASSIGNED


def test_a_failed_upload_opens_an_incident_and_training_goes_on() -> None:
    driver = Driver().running()
    failed = ev.CheckpointFailed(
        job_id=JOB, node=NodeId("n1"), step=50, detail="No space left on device", at_s=1.0
    )
    assert driver.send(failed) == ["job.i1 OPEN"]
    assert driver.job().state is JobState.RUNNING
    assert "No space left on device" in driver.incident().reason
    assert driver.commit(60) == ["job.i1 CLOSED"]


def test_a_checkpoint_that_cannot_be_loaded_is_told_and_the_next_one_ends_it() -> None:
    driver = Driver().running()
    failed = ev.CheckpointFailed(
        job_id=JOB, node=NodeId("n1"), step=50, detail="load: x is short", at_s=1.0, was_stored=True
    )
    assert driver.send(failed) == ["job.i1 OPEN"]
    assert driver.incident().reason == (
        "the checkpoint of step 50 could not be loaded (load: x is short); training went on from "
        "an older one, and its files are kept for people to look at"
    )
    assert driver.commit(60) == ["job.i1 CLOSED"]


def test_storage_that_stays_too_slow_is_one_incident_until_it_keeps_up() -> None:
    driver = Driver().running()
    assert driver.commit(50) == []
    assert driver.commit(113, is_behind=True) == ["job.i1 OPEN"]
    assert driver.job().state is JobState.RUNNING
    assert "too slow for checkpoint.storage_interval_steps" in driver.incident().reason
    # These are stored all the same: they count, and are no news.
    assert driver.commit(176, is_behind=True) == []
    assert driver.job().committed_step == 176
    assert driver.commit(200) == ["job.i1 CLOSED"]


def test_the_retry_budget_is_spent_without_checkpoints_and_refilled_by_one() -> None:
    driver = Driver().running(spares=0, retry_budget=2, in_place_restarts=9)

    def fault() -> None:
        driver.now_s += 3600.0
        driver.wait(0.0)
        driver.send(driver.exited(0, completed_step=driver.job().high_step + 1))
        driver.answer_all("/stop/")
        driver.answer_all("/start/")

    fault()
    assert driver.job().retry_left == 1
    driver.commit(50)
    assert driver.job().retry_left == 2
    driver.commit(50)
    driver.commit(40)
    fault()
    fault()
    assert driver.job().retry_left == 0
    fault()
    assert driver.job().state is JobState.FAILED
    assert "retry budget is spent" in driver.job().reason


@pytest.mark.parametrize("state", [state for state in JobState if state.name != "RESTARTING"])
def test_cancel_ends_a_job_in_every_state(state: JobState) -> None:
    driver = _in_state(state)
    before = driver.job()
    assert before.state is state
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    if state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED):
        assert driver.job() == before
    else:
        assert driver.job().state is JobState.CANCELLED
        assert driver.job().reason == "cancelled by the user"
    for incident in driver.machine.state.incidents.values():
        assert incident.state is IncidentState.CLOSED


@pytest.mark.parametrize("state", [state for state in JobState if state.name != "RESTARTING"])
def test_pause_and_resume_lose_no_job_in_any_state(state: JobState) -> None:
    driver = _in_state(state)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    ended = state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    assert driver.job().state is (state if ended else JobState.PAUSED)
    for number in (7, 8):
        driver.join(f"n{number}")
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    assert driver.job().state is (state if ended else JobState.STARTING)


def _in_state(state: JobState) -> Driver:
    """A job in this state, by the shortest way."""
    driver = Driver()
    match state:
        case JobState.QUEUED:
            driver.submit()
        case JobState.PROVISIONING:
            driver.running(spares=0).lose("n2")
            driver.answer_all("/stop/")
        case JobState.PREFLIGHT:
            driver.join("n1")
            driver.join("n2")
            driver.submit()
        case JobState.STARTING:
            driver.starting()
        case JobState.RUNNING:
            driver.running()
        case JobState.SUSPENDING:
            driver.running().send(driver.exited(0))
        case JobState.DIAGNOSING:
            driver.running(in_place_restarts=0).send(driver.exited(0))
            driver.answer_all("/stop/")
        case JobState.REPAIRING:
            _wait_for_the_breaker(driver)
        case JobState.PAUSED:
            driver.running().send(ev.JobPauseRequested(job_id=JOB))
            driver.answer_all("/stop/")
        case JobState.SUCCEEDED:
            driver.running()
            for rank in (0, 1):
                driver.send(driver.exited(rank, code=0))
        case JobState.FAILED:
            driver.running(retry_budget=0).send(driver.exited(0))
            driver.answer_all("/stop/")
        case JobState.CANCELLED:
            driver.running().send(ev.JobCancelRequested(job_id=JOB))
            driver.answer_all("/stop/")
        case JobState.RESTARTING:
            raise AssertionError("passes within one call")
    return driver


def _wait_for_the_breaker(driver: Driver) -> None:
    """One node was quarantined a moment ago; the next one has to wait."""
    driver.running()
    driver.lose("n3", gone=False)
    driver.lose("n2", gone=False)
    driver.answer("job/a1/stop/n1")


def test_the_breaker_holds_the_second_quarantine_back_until_the_window_has_passed() -> None:
    driver = Driver()
    _wait_for_the_breaker(driver)
    assert driver.node("n3").state is NodeState.QUARANTINED
    assert driver.job().state is JobState.REPAIRING
    assert "breaker allows were quarantined within 10 min" in driver.job().reason
    opens_s = driver.job().deadline_s
    assert opens_s == pytest.approx(driver.node("n3").quarantines_s[0] + 600.0)
    assert driver.wait(599.0) == []
    assert driver.wait(2.0)[0] == "n2 QUARANTINED"
    assert driver.incident().action is Action.REPLACE_NODES
