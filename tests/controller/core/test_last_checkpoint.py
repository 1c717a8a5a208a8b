"""A job has succeeded when its last checkpoint is stored; until then its state is kept."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.kinds import Action, Cause
from controller.core.node_events import NodeDisconnected
from controller.core.orders import PushCheckpoint
from controller.core.states import JobState, NodeState
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

WAIT_S = 600.0


def trained(**changes: object) -> Driver:
    """A job whose ranks have done all steps."""
    driver = Driver().running(spares=0, **{"last_checkpoint_s": WAIT_S, **changes})
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=100))
    return driver


def upload_fails(driver: Driver) -> None:
    driver.send(
        ev.CheckpointFailed(
            job_id=JOB,
            node=NodeId("n1"),
            step=100,
            detail="No space left on device",
            at_s=driver.now_s,
        )
    )


def paused() -> Driver:
    """The same after the store was full for as long as that is waited for."""
    driver = trained()
    upload_fails(driver)
    driver.wait(WAIT_S)
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PAUSED
    return driver


def push(driver: Driver, url: str = "") -> list[str]:
    return driver.send(ev.CheckpointPushRequested(job_id=JOB, checkpoint_url=url, timeout_s=60.0))


def test_a_job_waits_for_its_last_checkpoint_and_says_so() -> None:
    driver = trained()
    assert driver.job().state is JobState.RUNNING
    assert "waiting for the last checkpoint" in driver.job().reason
    upload_fails(driver)
    assert driver.job().reason == (
        "all 100 steps are done; waiting for the last checkpoint: step 100: No space left on device"
    )
    driver.commit(50)
    assert driver.job().state is JobState.RUNNING
    driver.commit(100)
    assert driver.job().state is JobState.SUCCEEDED
    assert driver.job().reason == (
        "all 100 steps are done; checkpoint 100 is committed in memory://"
    )


def test_a_checkpoint_that_came_first_is_not_waited_for() -> None:
    driver = Driver().running(spares=0, last_checkpoint_s=WAIT_S)
    driver.commit(100)
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=100))
    assert driver.job().state is JobState.SUCCEEDED


def test_an_exit_that_is_told_again_prolongs_nothing() -> None:
    driver = trained()
    upload_fails(driver)
    before = driver.job()
    driver.wait(WAIT_S / 2)
    driver.send(driver.exited(1, code=0, completed_step=100))
    assert (driver.job().deadline_s, driver.job().reason) == (before.deadline_s, before.reason)
    driver.wait(WAIT_S / 2)
    assert driver.job().state is JobState.SUSPENDING


def test_a_job_of_a_journal_that_knows_no_such_wait_waits_for_none() -> None:
    assert trained(last_checkpoint_s=0.0).job().state is JobState.SUCCEEDED


def test_a_job_is_paused_with_its_memory_kept_when_the_store_stays_full() -> None:
    driver = paused()
    job, incident = driver.job(), driver.incident(2)
    assert (incident.cause, incident.action) == (Cause.STORAGE, Action.PAUSE)
    assert job.needs_person
    assert "No space left on device" in job.reason
    assert "outlast ckpt push job" in job.reason
    # Nobody was told to free host memory, and nobody is blamed.
    assert not any("/forget/" in command for command in driver.machine.state.commands)
    assert {node.state for node in driver.machine.state.nodes.values()} == {NodeState.READY}


def test_pushing_ends_the_job_once_the_checkpoint_is_committed() -> None:
    driver = paused()
    assert push(driver) == [
        "open job/push1/n1",
        "open job/push1/n2",
        "send job/push1/n1",
        "send job/push1/n2",
    ]
    driver.commit(100)
    driver.answer("job/push1/n1")
    assert driver.job().state is JobState.PAUSED
    lines = driver.answer("job/push1/n2")
    assert driver.job().state is JobState.SUCCEEDED
    assert "open job/forget/n1" in lines


def test_pushing_elsewhere_says_where_the_checkpoint_is() -> None:
    driver = paused()
    push(driver, "file:///other/job")
    commands = driver.machine.state.commands.values()
    assert {
        each.command.checkpoint_url for each in commands if isinstance(each.command, PushCheckpoint)
    } == {"file:///other/job"}
    assert driver.job().checkpoint_url == "memory://"
    driver.commit(100)
    driver.answer_all("/push1/")
    assert driver.job().checkpoint_url == "file:///other/job"
    assert driver.job().reason.endswith("checkpoint 100 is committed in file:///other/job")


def test_a_push_that_fails_keeps_everything_and_can_be_repeated() -> None:
    driver = paused()
    push(driver, "file:///other/job")
    for node in ("n1", "n2"):
        driver.answer(f"job/push1/{node}", ok=False, error_kind="resource", detail="disk is full")
    job = driver.job()
    assert (job.state, job.checkpoint_url) == (JobState.PAUSED, "memory://")
    assert "disk is full" in job.reason
    push(driver)
    driver.commit(100)
    driver.answer_all("/push2/")
    assert driver.job().state is JobState.SUCCEEDED


def test_a_push_asks_nobody_while_a_node_is_away_or_an_older_one_runs() -> None:
    driver = paused()
    push(driver)
    push(driver)
    assert driver.job().num_pushes == 1
    driver.answer_all("/push1/")
    driver.send(NodeDisconnected(node=NodeId("n2")))
    push(driver)
    assert driver.job().num_pushes == 1


def test_a_push_is_waited_for_no_more_once_the_job_is_resumed_or_cancelled() -> None:
    for event in (ev.JobResumeRequested(job_id=JOB), ev.JobCancelRequested(job_id=JOB)):
        driver = paused()
        push(driver)
        driver.send(event)
        assert not any("/push1/" in command for command in driver.machine.state.commands)
        driver.answer_all("/push1/")
        assert driver.job().state is not JobState.PAUSED


def test_room_that_comes_back_after_the_pause_ends_the_job_without_a_push() -> None:
    driver = paused()
    driver.commit(100)
    assert driver.job().state is JobState.SUCCEEDED


def test_a_node_lost_while_the_last_checkpoint_is_awaited_restarts_the_job() -> None:
    driver = trained()
    driver.join("n3")
    driver.lose("n2")
    driver.answer_all("/stop/")
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert JOB not in driver.machine.state.done


def test_cancelling_while_waiting_ends_the_job() -> None:
    driver = trained()
    driver.send(ev.JobCancelRequested(job_id=JOB))
    assert driver.machine.state.commands
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.CANCELLED


def test_a_resumed_job_whose_steps_are_all_done_waits_again() -> None:
    driver = paused()
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=100))
    assert driver.job().state is JobState.RUNNING
    driver.commit(100)
    assert driver.job().state is JobState.SUCCEEDED


def test_storage_that_does_not_answer_at_the_start_pauses_the_job_and_blames_nobody() -> None:
    driver = Driver().starting(spares=0)
    silence = "checkpoint storage s3://b/job: no answer in 30 s"
    driver.send(
        ev.CheckpointFailed(
            job_id=JOB,
            node=NodeId("n1"),
            step=0,
            detail=silence,
            at_s=driver.now_s,
            is_awaited=True,
        )
    )
    assert driver.job().reason == f"n1 waits for storage before ranks start: {silence}"
    assert driver.job().num_incidents == 0
    driver.answer("job/a1/start/n1", ok=False, error_kind="storage", detail=silence)
    driver.answer_all("/stop/")
    job = driver.job()
    assert job.state is JobState.PAUSED
    assert job.reason == f"{silence}; `outlast resume job` continues it"
    assert driver.incident().cause is Cause.STORAGE
    assert driver.incident().culprits == ()
    assert job.retry_left == job.plan.retry_budget
    assert driver.node("n1").state is NodeState.READY
    driver.send(ev.JobResumeRequested(job_id=JOB))
    assert driver.job().state is not JobState.PAUSED
