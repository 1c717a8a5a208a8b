"""Which events follow from the records of jobs, and what is said of them."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.kinds import Cause
from controller.core.notifications.job_events import EventKind, JobEvent, job_events
from controller.core.states import IncidentState
from controller.notify.wording import headline
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver
from tests.controller.core.test_corruption import damaged
from tests.controller.core.test_detections import detected


def events_of(driver: Driver) -> list[JobEvent]:
    return list(job_events(driver.machine.state, 0.0))


def test_what_a_detector_only_logs_is_a_note_of_no_step() -> None:
    driver = Driver().running()
    driver.send(detected(driver))
    (note,) = events_of(driver)
    assert (note.kind, note.step, note.stops_job) == (EventKind.NOTE, None, False)
    assert note.nodes == ("n2",)
    assert headline(note) == "note: straggler, nothing was stopped"
    # It stays one when it is over, and that is no recovery.
    ended = ev.DetectionEnded(job_id=JOB, cause=Cause.STRAGGLER, node=NodeId("n2"), detail="over")
    driver.send(ended)
    assert events_of(driver) == [note]


def test_what_a_detector_acts_on_is_an_incident() -> None:
    driver = Driver().running()
    driver.send(detected(driver, acts=True, step=7))
    (fault,) = events_of(driver)
    assert (fault.kind, fault.step, fault.stops_job) == (EventKind.INCIDENT, 7, True)
    # Over before anything was decided, it is still a fault.
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.incident().state is IncidentState.CLOSED
    assert driver.incident().action is None
    assert next(each for each in events_of(driver)).kind is EventKind.INCIDENT


def test_checkpoints_that_cannot_be_stored_are_an_incident_and_the_job_goes_on() -> None:
    driver = Driver().running()
    driver.send(
        ev.CheckpointFailed(
            job_id=JOB, node=NodeId("n1"), step=8, detail="no space left", at_s=driver.now_s
        )
    )
    (trouble,) = events_of(driver)
    assert (trouble.kind, trouble.step, trouble.stops_job) == (EventKind.INCIDENT, None, False)
    assert headline(trouble) == "storage, the job goes on"


def test_memory_that_changed_by_itself_is_an_incident_and_no_note() -> None:
    driver = Driver().running()
    driver.send(damaged(driver))
    (found,) = events_of(driver)
    assert (found.kind, found.stops_job) == (EventKind.INCIDENT, False)
    assert headline(found) == "silent corruption, the job goes on"


def test_a_fault_in_the_start_has_no_step() -> None:
    driver = Driver().starting()
    driver.answer_all("/start/")
    driver.send(driver.exited(completed_step=-1))
    (fault,) = events_of(driver)
    assert fault.kind is EventKind.INCIDENT
    assert "step" not in headline(fault)
