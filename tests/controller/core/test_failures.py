"""Classes of failures: each is decided about, and journals of other versions are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.core import events as ev
from controller.core.causes import cause_of
from controller.core.changes import IncidentPut, StateChange
from controller.core.codec import decode_change, encode_change
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause
from controller.core.states import JobState
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

# Where another start may do better, as far as is known.
TRANSIENT = {
    FailureClass.NONE,
    FailureClass.CLEAN,
    FailureClass.CASCADE,
    FailureClass.NCCL,
    FailureClass.UNKNOWN,
}


@pytest.mark.parametrize("failure", FailureClass)
def test_every_class_of_failure_has_a_cause_and_none_is_transient_by_omission(
    failure: FailureClass,
) -> None:
    assert (cause_of(failure) is Cause.TRANSIENT) == (failure in TRANSIENT)


def test_a_kernel_that_failed_has_its_device_checked_before_another_start() -> None:
    driver = Driver().running()
    detail = "CUDA error: an illegal memory access was encountered"
    driver.send(driver.exited(1, code=1, fault_class="device_kernel", detail=detail))
    driver.answer_all("a1/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.DEVICE, Action.DIAGNOSE)
    assert "a kernel failed on a device" in incident.reason
    driver.searched({"n2": "fail"})
    assert driver.job().nodes == ("n1", "n3")


def test_a_kernel_that_failed_on_a_sound_device_is_started_again_there() -> None:
    driver = Driver().running()
    driver.send(driver.exited(1, code=1, fault_class="device_kernel"))
    driver.answer_all("a1/stop/")
    driver.searched()
    assert driver.incident().action is Action.RESTART_IN_PLACE
    assert driver.job().nodes == ("n1", "n2")


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind is not ErrorKind.STALE])
def test_a_start_that_failed_is_of_a_class_by_the_kind_of_its_error(kind: ErrorKind) -> None:
    driver = Driver().starting()
    driver.answer("job/a1/start/n1", ok=False, error_kind=kind, detail="it cannot")
    # What is missing is judged when all have answered.
    driver.answer_all("/start/n2")
    (sign, *_) = driver.incident().evidence
    assert sign.fault_class == FailureClass(kind.value)


def _as_written(driver: Driver) -> tuple[dict[str, Any], dict[str, Any]]:
    """The change of the driver's incident in a journal, and its first sign in there."""
    change = json.loads(json.dumps(encode_change(IncidentPut(incident=driver.incident()))))
    return change, change["incident"]["evidence"][0]


def _first_sign(change: StateChange) -> Evidence:
    assert isinstance(change, IncidentPut)
    return change.incident.evidence[0]


def test_a_class_of_another_version_is_read_as_unknown() -> None:
    driver = Driver().running()
    driver.send(driver.exited(0))
    change, sign = _as_written(driver)
    assert sign["fault_class"] == "killed_by_signal"
    sign["fault_class"] = "melted"
    assert _first_sign(decode_change(change)).fault_class is FailureClass.UNKNOWN


def test_what_a_detector_found_is_read_from_a_journal_that_has_it_as_a_class() -> None:
    driver = Driver().running()
    found = ev.Detected(
        job_id=JOB,
        attempt=driver.attempt(),
        cause=Cause.STRAGGLER,
        node=NodeId("n2"),
        rank=1,
        detail="rank 1 is slow",
        at_s=driver.now_s,
    )
    driver.send(found)
    change, sign = _as_written(driver)
    assert (sign["detected"], sign["fault_class"]) == ("straggler", "")
    # As it was written before.
    del sign["detected"]
    sign["fault_class"] = "straggler"
    assert decode_change(change) == IncidentPut(incident=driver.incident())
