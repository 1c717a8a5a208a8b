"""What a person may want to be told of jobs: faults, recoveries, ends.

A notice follows from the records alone, so that a controller that was away finds what it has not
told yet. Whether it is told, and together with which others, is `core.telling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from controller.core import cost
from controller.core.changes import State
from controller.core.records import IncidentRecord, JobRecord
from controller.core.states import TERMINAL, IncidentState, JobState
from outlast.ids import JobId


class NoticeKind(StrEnum):
    """What a notice is about."""

    INCIDENT = "incident"  # a fault was found
    RECOVERY = "recovery"  # training is past a fault again
    PAUSED = "paused"  # the controller paused a job; it waits for a person
    FAILURE = "failure"
    COMPLETION = "completion"


_ENDS = {JobState.FAILED: NoticeKind.FAILURE, JobState.SUCCEEDED: NoticeKind.COMPLETION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One thing that happened to a job."""

    key: str
    """The same for the same thing, at every look and after every restart."""
    kind: NoticeKind
    job: JobId
    at_s: float
    incident: str = ""
    cause: str = ""
    action: str = ""
    reason: str = ""
    """Why, in a sentence or two."""
    nodes: tuple[str, ...] = ()
    """Nodes that are to blame."""
    step: int = 0
    """Of a fault: the last step before it. Of an end: the last step of all."""
    lost_s: float | None = None
    """Of a recovery: seconds in which the job stood still or repeated steps."""

    @property
    def is_of_incident(self) -> bool:
        return self.kind in (NoticeKind.INCIDENT, NoticeKind.RECOVERY)


def notices(state: State, since_s: float) -> Iterator[Notice]:
    """What has happened since then, each job's own in the order in which it happened."""
    for job in state.jobs.values():
        if job.state in TERMINAL and job.since_s < since_s:
            continue
        for incident in state.incidents_of(job):
            yield from _of_incident(incident, since_s)
        yield from _of_job(job, since_s)


def _of_incident(incident: IncidentRecord, since_s: float) -> Iterator[Notice]:
    if incident.opened_s >= since_s:
        yield _about(incident, NoticeKind.INCIDENT, incident.opened_s)
    is_over = incident.state is IncidentState.CLOSED and incident.recovered_s is not None
    if is_over and incident.closed_s is not None and incident.closed_s >= since_s:
        yield _about(incident, NoticeKind.RECOVERY, incident.closed_s)


def _about(incident: IncidentRecord, kind: NoticeKind, at_s: float) -> Notice:
    return Notice(
        key=f"{kind}/{incident.incident}",
        kind=kind,
        job=incident.job,
        at_s=at_s,
        incident=incident.incident,
        cause=str(incident.cause),
        action=str(incident.action or ""),
        reason=incident.reason,
        nodes=tuple(incident.culprits),
        step=incident.fault_step,
        lost_s=cost.lost_s(incident) if kind is NoticeKind.RECOVERY else None,
    )


def _of_job(job: JobRecord, since_s: float) -> Iterator[Notice]:
    kind = _ENDS.get(job.state)
    if job.state is JobState.PAUSED and job.needs_person:
        kind = NoticeKind.PAUSED
    if kind is None or job.since_s < since_s:
        return
    yield Notice(
        # A job may be paused again.
        key=f"{kind}/{job.job_id}/{job.since_s:.3f}",
        kind=kind,
        job=job.job_id,
        at_s=job.since_s,
        reason=job.error or job.reason,
        step=job.high_step,
    )
