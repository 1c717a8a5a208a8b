"""Checkpoints that were committed and cannot be loaded: a person decides, nothing is retried."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.kinds import Action, Cause, Rung
from controller.core.node_events import NodeDisconnected
from controller.core.states import IncidentState, JobState
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

DAMAGE = (
    "file:///ckpt/job has no checkpoint that can be loaded: step 40: step-40.1/rank-0.distcp: "
    "bytes 0 to 4096 do not fit their checksum"
)
DETAIL = (
    f"checkpoint.core.errors.NoCheckpointError: {DAMAGE} (exception, class 'checkpoint', rule "
    "'no checkpoint to load' of table 2)"
)


@pytest.mark.parametrize("ladder", [(Rung.RESTART,), (Rung.RESTART, Rung.REPLACE, Rung.PAUSE)])
def test_the_job_is_paused_at_the_first_try_with_the_damaged_file_named(
    ladder: tuple[Rung, ...],
) -> None:
    driver = Driver().running(spares=0, ladder=ladder)
    driver.commit(40)
    driver.send(driver.exited(0, completed_step=45))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    values = {"code": 1, "fault_class": "checkpoint", "fingerprint": "c0", "completed_step": -1}
    on_another = DETAIL.replace(
        "bytes 0 to 4096 do not fit their checksum", "corrupt on another rank"
    )
    driver.send(driver.exited(1, **{**values, "detail": on_another}))
    driver.send(driver.exited(0, **{**values, "detail": DETAIL}))
    driver.answer_all("/stop/")
    job = driver.job()
    assert (job.state, job.attempt, job.needs_person) == (JobState.PAUSED, 2, True)
    assert job.reason.startswith(f"{DAMAGE}; repair or bring back what is damaged")
    incident = driver.incident(2)
    assert (incident.action, incident.cause) == (Action.PAUSE, Cause.CHECKPOINT)
    assert incident.culprits == ()
    # Once the file is back, the job goes on.
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    assert (driver.job().state, driver.job().attempt) == (JobState.STARTING, 3)


def test_storage_trouble_of_a_failed_job_does_not_stay_open_for_a_node_that_is_away() -> None:
    driver = Driver().running(spares=0)
    driver.send(
        ev.CheckpointFailed(
            job_id=JOB, node=NodeId("n1"), step=10, detail="ENOSPC", at_s=driver.now_s
        )
    )
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.CANCELLED
    driver.answer("job/forget/n1")
    assert driver.incident().state is IncidentState.OPEN, "the other node may still upload"
    driver.send(NodeDisconnected(node=NodeId("n2")))
    assert driver.incident().state is IncidentState.CLOSED
