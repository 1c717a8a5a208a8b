"""Incidents: what a fault was, what was done, and what it cost."""

from __future__ import annotations

from controller.core import accounting
from controller.core.changes import CheckpointStored, CheckpointWaited, IncidentPut
from controller.core.context import Context
from controller.core.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CommandFinished,
    JobAdvanced,
)
from controller.core.frozen import replace
from controller.core.incident_record import Evidence, IncidentRecord, TimelineEntry
from controller.core.kinds import Cause, EvidenceKind
from controller.core.orders import ForgetJob
from controller.core.records import JobRecord
from controller.core.states import AT_WORK, TERMINAL, IncidentState, JobState
from outlast.chosen import is_given_up
from outlast.ids import NodeId, incident_id

_MAX_NOTE = 4_000


def open_for(ctx: Context, job: JobRecord, evidence: Evidence) -> JobRecord:
    """Open a job's incident. One that is still open is superseded: each fault has its own."""
    account = accounting.blamed(job.account, evidence.at_s, ctx.now_s)
    job = close_for(ctx, ctx.put(replace(job, account=account)), "superseded by the next fault")
    number = job.num_incidents + 1
    incident = _new(ctx, job, number, evidence, IncidentState.EVIDENCE)
    return ctx.put(replace(job, incident=incident.incident, num_incidents=number))


def close_for(ctx: Context, job: JobRecord, why: str) -> JobRecord:
    """Close a job's open incident, if it has one."""
    incident = ctx.incident_of(job)
    if incident is None:
        return job
    incident = ctx.note(incident, "closed", why)
    ctx.move_incident(replace(incident, closed_s=ctx.now_s), IncidentState.CLOSED)
    account = job.account
    if account.part is accounting.Part.REDO:
        account = accounting.moved(account, accounting.Part.PRODUCTIVE, ctx.now_s)
    return ctx.put(replace(job, incident=None, account=account))


def reached(ctx: Context, job: JobRecord, completed_step: int) -> None:
    """Some rank had completed this step when the fault struck."""
    incident = ctx.incident_of(job)
    if incident is not None and completed_step > incident.fault_step:
        ctx.put(replace(incident, fault_step=completed_step))


def add_finding(ctx: Context, job: JobRecord, node: NodeId, verdict: str, detail: str = "") -> None:
    """A node's checks have ended."""
    incident = ctx.incident_of(job)
    if incident is None:
        return
    others = tuple(found for found in incident.findings if found[0] != node)
    incident = ctx.put(replace(incident, findings=(*others, (node, verdict))))
    ctx.note(incident, "diagnostics", f"{node}: {verdict}{': ' if detail else ''}{detail}")


def add_note(ctx: Context, job: JobRecord, phase: str, detail: str) -> None:
    """One more line in the timeline of a job's open incident."""
    incident = ctx.incident_of(job)
    if incident is not None and detail:
        ctx.note(incident, phase, detail[:_MAX_NOTE])


def add_stacks(ctx: Context, job: JobRecord, event: CommandFinished) -> None:
    """Where a node's processes stood before they were stopped."""
    incident = ctx.incident_of(job)
    for stacks in event.stacks if incident is not None else ():
        assert incident is not None
        sign = Evidence(
            kind=EvidenceKind.STACKS,
            node=event.node,
            rank=None if stacks.rank < 0 else stacks.rank,
            detail=stacks.location,
            at_s=ctx.now_s,
            fingerprint=stacks.fingerprint,
            traceback=stacks.text,
        )
        incident = ctx.add_evidence(incident, sign)


def advanced(ctx: Context, job: JobRecord, event: JobAdvanced) -> None:
    """Training goes on: note what it cost, and close once it is past the fault."""
    incident = ctx.incident_of(job)
    if incident is None:
        return
    if incident.state is IncidentState.ACTING:
        incident = ctx.note(incident, "first_step", event.split)
        incident = ctx.move_incident(
            replace(incident, resumed_step=event.resumed_step, recovered_s=event.at_s),
            IncidentState.VERIFYING,
        )
    is_past = event.completed_step >= max(incident.fault_step, job.replayed_step or 0)
    if incident.state is IncidentState.VERIFYING and is_past:
        close_for(ctx, job, _is_past(job, incident))


def _is_past(job: JobRecord, incident: IncidentRecord) -> str:
    if job.plan.is_script and incident.fault_step < 1:
        return "its script runs again"
    return f"training is past step {incident.fault_step} again"


def checkpoint_committed(ctx: Context, event: CheckpointCommitted) -> bool:
    """A newer verified checkpoint refills the retry budget and ends storage trouble.

    Says whether it is newer.
    """
    job = ctx.state.jobs.get(event.job_id)
    if job is None or (job.committed_step is not None and event.step <= job.committed_step):
        return False
    if is_given_up(job.chosen, event.step, event.saved_by or event.attempt):
        # Its upload was under way when a person chose to go on elsewhere.
        return False
    ctx.record(
        CheckpointStored(
            job_id=job.job_id,
            committed_step=event.step,
            high_step=max(job.high_step, event.step),
            retry_left=job.plan.retry_budget,
            faults_in_row=0,
            at_s=ctx.now_s,
        )
    )
    job = _stalled(ctx, ctx.state.jobs[job.job_id], event)
    if event.is_behind:
        _storage_is_slow(ctx, job, event.step)
    else:
        close_storage_trouble(ctx, job, f"step {event.step} was committed")
    return True


def _stalled(ctx: Context, job: JobRecord, event: CheckpointCommitted) -> JobRecord:
    """Training waited for copies to host memory: that much of it was not productive."""
    more_s = event.stalled_s - job.stalled_s
    if event.attempt != job.attempt or more_s < accounting.LEAST_STALL_S:
        return job
    ctx.record(
        CheckpointWaited(
            job_id=job.job_id, more_s=more_s, at_s=ctx.now_s, stalled_s=event.stalled_s
        )
    )
    return ctx.state.jobs[job.job_id]


def close_storage_trouble(ctx: Context, job: JobRecord, why: str) -> None:
    """Uploads work again, or nobody uploads any more."""
    trouble = storage_trouble(ctx, job)
    if trouble is not None:
        trouble = ctx.note(trouble, "closed", why)
        ctx.move_incident(replace(trouble, closed_s=ctx.now_s), IncidentState.CLOSED)


def checkpoint_failed(ctx: Context, event: CheckpointFailed) -> None:
    """A checkpoint cannot be stored or loaded. Training goes on; the incident says so."""
    job = ctx.state.jobs.get(event.job_id)
    if job is None or job.state in (JobState.FAILED, JobState.CANCELLED):
        return
    evidence = Evidence(
        kind=EvidenceKind.CHECKPOINT,
        node=event.node,
        rank=None,
        detail=f"step {event.step}: {event.detail}",
        at_s=event.at_s,
    )
    trouble = storage_trouble(ctx, job)
    if trouble is not None:
        ctx.add_evidence(trouble, evidence)
        return
    open_beside(ctx, job, evidence, cause=Cause.STORAGE, reason=_trouble_in_words(job, event))


def _storage_is_slow(ctx: Context, job: JobRecord, step: int) -> None:
    """Checkpoints arrive, but later than the spec wants them; each further one is no news."""
    if storage_trouble(ctx, job) is not None:
        return
    evidence = Evidence(
        kind=EvidenceKind.CHECKPOINT,
        node=None,
        rank=None,
        detail=f"step {step}: storing takes longer than training takes between two checkpoints",
        at_s=ctx.now_s,
    )
    open_beside(
        ctx,
        job,
        evidence,
        cause=Cause.STORAGE,
        reason="storage is too slow for checkpoint.storage_interval_steps: uploads start late, and "
        "a loss of host memory would cost more steps than the spec asks for; training goes on. "
        "Make the interval longer, raise checkpoint.upload_bytes_per_s if it is set, or find a "
        "faster store",
    )


def open_beside(
    ctx: Context,
    job: JobRecord,
    evidence: Evidence,
    *,
    cause: Cause,
    reason: str,
    culprits: tuple[NodeId, ...] = (),
) -> None:
    """Open an incident that does not stop training."""
    number = job.num_incidents + 1
    incident = _new(ctx, job, number, evidence, IncidentState.OPEN)
    ctx.put(replace(incident, cause=cause, reason=reason, culprits=culprits))
    ctx.put(replace(job, num_incidents=number))


def _trouble_in_words(job: JobRecord, event: CheckpointFailed) -> str:
    if event.was_stored:
        return (
            f"the checkpoint of step {event.step} could not be loaded ({event.detail}); training "
            "went on from an older one, and its files are kept for people to look at"
        )
    if event.was_copied:
        return (
            f"host memory is not on another node ({event.detail}); training goes on, but what is "
            "in memory on one node only is lost with it, and then storage is next"
        )
    last = job.plan.total_steps
    if last is not None and event.step >= last and job.plan.last_checkpoint_s > 0:
        return (
            f"the last checkpoint could not be stored ({event.detail}); its upload is tried again "
            f"for {job.plan.last_checkpoint_s:g} s (checkpoint.last_timeout_s)"
        )
    return (
        f"a checkpoint could not be stored ({event.detail}); training goes on from host memory, "
        "and the next upload is tried as planned"
    )


def tend(ctx: Context) -> None:
    """End the storage trouble of finished jobs once nobody uploads for them any more."""
    for incident in ctx.open_incidents():
        job = ctx.state.jobs[incident.job]
        if not _is_storage_trouble(incident) or job.state not in TERMINAL:
            continue
        # A node that is away may never come back to finish its uploads, and nobody waits for it.
        asked = ctx.commands_of(ForgetJob, job=job.job_id)
        are_away = ctx.reconciling_until_s is None and not any(ctx.connected(c.node) for c in asked)
        if are_away:
            newest = "none" if job.committed_step is None else f"step {job.committed_step}"
            ctx.put(
                replace(
                    incident,
                    reason=f"a checkpoint could not be stored ({incident.evidence[-1].detail}), "
                    f"and the job has ended; the newest in storage: {newest}",
                )
            )
            close_storage_trouble(ctx, job, "no more uploads are tried")


def storage_trouble(ctx: Context, job: JobRecord) -> IncidentRecord | None:
    """The open incident that says that checkpoints of a job do not get to storage."""
    for incident in ctx.open_incidents():
        if _is_storage_trouble(incident) and incident.job == job.job_id:
            return incident
    return None


def _is_storage_trouble(incident: IncidentRecord) -> bool:
    return incident.state is IncidentState.OPEN and incident.cause is Cause.STORAGE


def _new(
    ctx: Context, job: JobRecord, number: int, evidence: Evidence, state: IncidentState
) -> IncidentRecord:
    fault_s = min(evidence.at_s, ctx.now_s)
    incident = IncidentRecord(
        incident=incident_id(job.job_id, number),
        job=job.job_id,
        attempt=job.attempt,
        state=state,
        opened_s=ctx.now_s,
        fault_s=fault_s,
        fault_step=-1,
        # Of a hang, the time in which it stood is none that it ran.
        ran_s=max(0.0, fault_s - job.since_s) if job.state in AT_WORK else 0.0,
        evidence=(evidence,),
        timeline=(
            TimelineEntry(phase="fault", at_s=fault_s, detail=evidence.detail),
            TimelineEntry(phase="detected", at_s=ctx.now_s),
        ),
    )
    ctx.record(IncidentPut(incident=incident))
    return incident
