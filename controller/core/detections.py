"""What detectors find while workers go on: an incident that says so, or a fault.

An incident of this kind stays OPEN for as long as what it tells is true, and for no
longer than the attempt in which it was seen. What is found again meanwhile is counted.
"""

from __future__ import annotations

from controller.core import corruption, incidents, jobs, link_signs
from controller.core.context import Context
from controller.core.events import Detected, DetectionEnded
from controller.core.frozen import replace
from controller.core.incident_record import Evidence, IncidentRecord
from controller.core.kinds import Cause, EvidenceKind
from controller.core.records import JobRecord
from controller.core.states import AT_WORK, TERMINAL, IncidentState, JobState

# Told by agents and the cluster of nodes, and what workers write there, whatever the job does.
HOST_CAUSES = (
    *(Cause.HOST_MEMORY, Cause.DISK, Cause.KERNEL_LOG, Cause.NODE_CONDITION, Cause.TRAFFIC),
    # Beside what steps show, the end of a data loader.
    *(Cause.WORKER_LOG, Cause.STORAGE, Cause.DATA_STALL),
)
# Of what is found again and again: the first and the newest. The record is written anew each time.
MAX_SIGNS = 16


def found(ctx: Context, event: Detected) -> None:
    """Something was found. The same about the same node is one incident."""
    job = ctx.state.jobs.get(event.job_id)
    if event.cause is Cause.SILENT_CORRUPTION:
        if job is not None:
            corruption.found(ctx, job, event)
        return
    # A start has no steps to judge, but its hosts and its store can fail all the same.
    where = AT_WORK if event.cause in HOST_CAUSES else (JobState.RUNNING,)
    if job is None or event.attempt != job.attempt or job.state not in where:
        return
    sign = Evidence(
        kind=EvidenceKind.DETECTED,
        node=event.node,
        rank=event.rank,
        detail=event.detail,
        at_s=event.at_s,
        detected=event.cause,
    )
    if event.acts and not _has_acted(ctx, job, event):
        if event.cause is Cause.SLOWDOWN:
            sign = link_signs.told(sign, link_signs.known(ctx, job))
        jobs.fault(ctx, job, sign)
        if event.step is not None:
            # The ranks may stop before they can say how far they were.
            incidents.reached(ctx, ctx.state.jobs[job.job_id], event.step)
        return
    known = _open(ctx, job, event)
    if known is not None:
        _count(ctx, known, sign, event.count)
        return
    what = "training" if job.state is JobState.RUNNING else "the start"
    reason = f"{event.detail}; {what} goes on"
    # It is reported of a node, and nothing is done to it. A store is not the node that uses it.
    told_of = () if event.node is None or event.cause is Cause.STORAGE else (event.node,)
    incidents.open_beside(ctx, job, sign, cause=event.cause, reason=reason, culprits=told_of)


def ended(ctx: Context, event: DetectionEnded) -> None:
    """What was found is true no more."""
    job = ctx.state.jobs.get(event.job_id)
    known = None if job is None else _open(ctx, job, event)
    if known is not None:
        _close(ctx, known, event.detail)


def tend(ctx: Context) -> None:
    """Close what was found in attempts that have ended."""
    for incident in ctx.open_incidents():
        if not _is_open(incident):
            continue
        job = ctx.state.jobs[incident.job]
        if job.state in TERMINAL or job.attempt != incident.attempt:
            _close(ctx, incident, "the attempt has ended")
        elif corruption.is_past(ctx, incident):
            _close(ctx, incident, "it was not seen again")


def _count(ctx: Context, incident: IncidentRecord, sign: Evidence, count: int) -> None:
    """The same again: one incident however often it comes."""
    first, *rest = incident.evidence
    is_known = any(replace(sign, at_s=each.at_s) == each for each in incident.evidence)
    signs = incident.evidence if is_known else (first, *rest[2 - MAX_SIGNS :], sign)
    last_s = max(sign.at_s, incident.last_s or incident.fault_s)
    ctx.put(replace(incident, evidence=signs, count=incident.count + count, last_s=last_s))


def _close(ctx: Context, incident: IncidentRecord, why: str) -> None:
    incident = ctx.note(incident, "closed", why)
    ctx.move_incident(replace(incident, closed_s=ctx.now_s), IncidentState.CLOSED)


def _open(ctx: Context, job: JobRecord, event: Detected | DetectionEnded) -> IncidentRecord | None:
    for incident in ctx.open_incidents():
        if (
            _is_open(incident)
            and (incident.job, incident.cause) == (job.job_id, event.cause)
            and incident.evidence[0].node == event.node
        ):
            return incident
    return None


def _is_open(incident: IncidentRecord) -> bool:
    is_detection = incident.evidence[0].kind is EvidenceKind.DETECTED
    return is_detection and incident.state is IncidentState.OPEN


def _has_acted(ctx: Context, job: JobRecord, event: Detected) -> bool:
    """Whether this was acted on before: once a job, or it would be restarted for ever."""
    if event.cause is Cause.SPIKE and event.step is not None:
        # Training went on behind what was left out. So soon again, it was not those batches.
        undone = (each.last for each in job.skipped if each.last > each.first)
        return event.step - max(undone, default=-job.plan.rollback_steps) < job.plan.rollback_steps
    return any(
        incident.action is not None and _is_about(incident, event)
        for incident in ctx.state.incidents_of(job)
    )


def _is_about(incident: IncidentRecord, event: Detected) -> bool:
    """Whether it began with the same. Its cause may be another: that of an end beside it."""
    first = incident.evidence[0]
    return first.detected is event.cause and (event.node is None or event.node == first.node)
