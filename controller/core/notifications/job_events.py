"""Events of jobs that people may be notified of: faults, notes, recoveries, pauses, ends.

They are derived from the records alone, so a restarted controller finds those it has not sent yet.
Which of them are sent, and which make one message, is decided by `grouping`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from controller.core import cost
from controller.core.changes import State
from controller.core.incident_record import IncidentRecord
from controller.core.records import JobRecord
from controller.core.states import TERMINAL, IncidentState, JobState
from outlast.ids import JobId


class EventKind(StrEnum):
    """What an event is about."""

    INCIDENT = "incident"  # a fault was found, or checkpoints cannot be stored
    NOTE = "note"  # a detector logged something, and stopped nothing
    RECOVERY = "recovery"  # training is past a fault again
    PAUSED = "paused"  # the controller paused a job; it waits for a person
    FAILURE = "failure"
    COMPLETION = "completion"


_ENDS = {JobState.FAILED: EventKind.FAILURE, JobState.SUCCEEDED: EventKind.COMPLETION}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """One event of a job."""

    key: str
    """Identifies the event, also after a restart of the controller."""
    kind: EventKind
    job: JobId
    at_s: float
    incident: str = ""
    cause: str = ""
    action: str = ""
    reason: str = ""
    """Why, in a sentence or two."""
    nodes: tuple[str, ...] = ()
    """Nodes that are to blame."""
    step: int | None = None
    """Of a fault: the last step before it, if one is known. Of an end: the last step of all."""
    stops_job: bool = True
    """Of an incident: whether the job was stopped for it."""
    lost_s: float | None = None
    """Of a recovery: seconds in which the job stood still or repeated steps."""

    @property
    def is_of_incident(self) -> bool:
        return self.kind in (EventKind.INCIDENT, EventKind.RECOVERY, EventKind.NOTE)


def job_events(state: State, since_s: float) -> Iterator[JobEvent]:
    """Events since then: job by job, those of each in the order of their times."""
    for job in state.jobs.values():
        if job.state in TERMINAL and job.since_s < since_s:
            continue
        found = [
            event
            for incident in state.incidents_of(job)
            for event in _of_incident(incident, since_s)
        ]
        # Incidents may overlap. The end of a job comes last: of equal times too.
        yield from sorted((*found, *_of_job(job, since_s)), key=lambda event: event.at_s)


def _of_incident(incident: IncidentRecord, since_s: float) -> Iterator[JobEvent]:
    if incident.opened_s >= since_s:
        kind = EventKind.NOTE if incident.is_note else EventKind.INCIDENT
        yield _about(incident, kind, incident.opened_s)
    is_over = incident.state is IncidentState.CLOSED and incident.recovered_s is not None
    if is_over and incident.closed_s is not None and incident.closed_s >= since_s:
        yield _about(incident, EventKind.RECOVERY, incident.closed_s)


def _about(incident: IncidentRecord, kind: EventKind, at_s: float) -> JobEvent:
    return JobEvent(
        key=f"{kind}/{incident.incident}",
        kind=kind,
        job=incident.job,
        at_s=at_s,
        incident=incident.incident,
        cause=str(incident.cause),
        action=str(incident.action or ""),
        reason=incident.reason,
        nodes=tuple(incident.culprits),
        # No rank has said how far it was: it is a note, or the fault was in the start.
        step=None if incident.fault_step < 0 else incident.fault_step,
        stops_job=incident.stops_job,
        lost_s=cost.lost_s(incident) if kind is EventKind.RECOVERY else None,
    )


def _of_job(job: JobRecord, since_s: float) -> Iterator[JobEvent]:
    kind = _ENDS.get(job.state)
    if job.state is JobState.PAUSED and job.needs_person:
        kind = EventKind.PAUSED
    if kind is None or job.since_s < since_s:
        return
    yield JobEvent(
        # A job may be paused again.
        key=f"{kind}/{job.job_id}/{job.since_s:.3f}",
        kind=kind,
        job=job.job_id,
        at_s=job.since_s,
        reason=job.error or job.reason,
        step=job.high_step,
    )
