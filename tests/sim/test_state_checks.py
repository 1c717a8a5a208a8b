"""Comparing what was decided with what the journal has."""

from __future__ import annotations

from dataclasses import replace

from controller.core.changes import IncidentPut, State
from controller.core.incident_record import IncidentRecord
from controller.core.states import IncidentState
from controller.sim.state_checks import is_same
from outlast.ids import Attempt, IncidentId, JobId


def incident(reason: str = "") -> IncidentRecord:
    return IncidentRecord(
        incident=IncidentId("job/1"),
        job=JobId("job"),
        attempt=Attempt(1),
        state=IncidentState.EVIDENCE,
        opened_s=1.0,
        fault_s=1.0,
        fault_step=0,
        reason=reason,
    )


def state_with(record: IncidentRecord) -> State:
    state = State()
    state.apply(IncidentPut(incident=record))
    return state


def test_equal_records_are_one_object_after_a_comparison() -> None:
    decided, journalled = state_with(incident()), state_with(incident())
    assert is_same(decided, journalled)
    record = decided.incidents[IncidentId("job/1")]
    assert journalled.incidents[IncidentId("job/1")] is record


def test_a_record_that_changes_after_a_comparison_is_seen() -> None:
    decided, journalled = state_with(incident()), state_with(incident())
    assert is_same(decided, journalled)
    decided.apply(IncidentPut(incident=replace(incident(), reason="other")))
    assert not is_same(decided, journalled)
    assert journalled.incidents[IncidentId("job/1")].reason == ""
