"""What may be deleted of ended jobs and old incidents, and what deleting changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from controller.core import events as ev
from controller.core.batches import compacted
from controller.core.changes import IncidentPut, JobPut, State, fold
from controller.core.codec import decode_change, encode_change
from controller.core.effects import Persist
from controller.core.records import JobRecord
from controller.core.retention import Expired, Retention, expired, may_prune
from controller.core.states import JobState
from outlast.ids import IncidentId, JobId, incident_id
from tests.controller.core.driver import JOB, Driver

DAY_S = 86_400.0


def _ended(*, forgets: bool = True) -> Driver:
    """A job that had a fault and was cancelled."""
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    if forgets:
        driver.answer_all("/forget/")
    return driver


def _jobs(*ended_s: float, steps: int = 0) -> State:
    """Jobs that ended then, and nothing else."""
    job = _ended().job()
    return fold(
        JobPut(
            job=replace(
                job,
                job_id=JobId(f"j{place}"),
                finished_s=at_s,
                high_step=steps,
                num_incidents=0,
            )
        )
        for place, at_s in enumerate(ended_s)
    )


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        (Retention(), ()),
        (Retention(ended_jobs_days=2.0), ("j0",)),
        (Retention(ended_jobs=1), ("j0", "j2")),
        (Retention(curve_steps=250), ("j0",)),
    ],
)
def test_jobs_expire_by_age_and_by_size_oldest_first(
    limits: Retention, gone: tuple[str, ...]
) -> None:
    state = _jobs(1 * DAY_S, 3 * DAY_S, 2 * DAY_S, steps=100)
    assert expired(state, limits, 3.5 * DAY_S) == Expired(jobs=tuple(map(JobId, gone)))


def test_a_job_that_goes_on_never_expires() -> None:
    driver = Driver().running()
    limits = Retention(ended_jobs_days=1e-9, ended_jobs=1)
    assert expired(driver.machine.state, limits, 1e12) == Expired()
    driver.send(ev.RecordsExpired(jobs=(JOB,)))
    assert driver.job().state is JobState.RUNNING


def test_a_job_stays_while_a_node_has_not_forgotten_it() -> None:
    driver = _ended(forgets=False)
    limits = Retention(ended_jobs_days=1e-9)
    assert driver.job().held_by
    assert not may_prune(driver.machine.state, JOB)
    assert expired(driver.machine.state, limits, 1e12) == Expired()
    driver.send(ev.RecordsExpired(jobs=(JOB,)))
    driver.answer_all("/forget/")
    assert expired(driver.machine.state, limits, 1e12).jobs == (JOB,)


def test_a_deleted_job_leaves_nothing_and_its_name_is_free() -> None:
    driver = _ended()
    before = fold(driver.machine.state.as_changes())
    (persist,) = driver.machine.handle(ev.RecordsExpired(jobs=(JOB,)), driver.now_s)
    assert isinstance(persist, Persist)
    for change in compacted(persist.changes):
        before.apply(decode_change(json.loads(json.dumps(encode_change(change)))))
    state = driver.machine.state
    assert before == state
    assert (state.jobs, state.incidents, state.attempts, state.done) == ({}, {}, {}, {})
    assert JOB not in state.index.num_held
    assert not any(job == JOB for _, job in state.index.of_job)
    # Late words about it change nothing.
    driver.send(ev.RecordsExpired(jobs=(JOB,)))
    driver.commit(50)
    driver.send(ev.JobCancelRequested(job_id=JOB))
    assert state.jobs == {}
    driver.submit()
    assert driver.job().state is not JobState.CANCELLED


def test_a_deleted_job_is_gone_within_one_batch_too() -> None:
    driver = _ended()
    changes = [
        change
        for change in driver.machine.state.as_changes()
        if isinstance(change, JobPut | IncidentPut)
    ]
    (persist,) = driver.machine.handle(ev.RecordsExpired(jobs=(JOB,)), driver.now_s)
    assert isinstance(persist, Persist)
    again = [*changes, *persist.changes, *changes]
    assert fold(compacted(again)) == fold(again)


def _with_incidents(count: int) -> tuple[JobRecord, Driver]:
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    driver.advanced(20, 10)
    first = driver.incident()
    state = fold(driver.machine.state.as_changes())
    for number in range(2, count + 1):
        state.apply(IncidentPut(incident=replace(first, incident=incident_id(JOB, number))))
    job = replace(state.jobs[JOB], num_incidents=count)
    state.apply(JobPut(job=job))
    return job, Driver(state)


def test_a_job_that_goes_on_keeps_its_newest_incidents() -> None:
    job, driver = _with_incidents(15)
    limits = Retention(incidents_per_job=10)
    due = expired(driver.machine.state, limits, driver.now_s)
    assert due.incidents == tuple(incident_id(JOB, number) for number in range(1, 6))
    driver.send(ev.RecordsExpired(incidents=due.incidents))
    left = [incident.incident for incident in driver.machine.state.incidents_of(job)]
    assert left == [incident_id(JOB, number) for number in range(6, 16)]
    assert expired(driver.machine.state, limits, driver.now_s) == Expired()
    # The next one has the next number.
    driver.send(driver.exited(0))
    assert driver.job().incident == incident_id(JOB, 16)
    driver.send(ev.RecordsExpired(incidents=(incident_id(JOB, 16), IncidentId("none"))))
    assert driver.job().incident in driver.machine.state.incidents
