"""What happens to jobs: the handlers of their events.

They only note what happened, so a repeated or late event changes nothing twice;
`steps` then moves the job.
"""

from __future__ import annotations

from controller.core import (
    attempts,
    elastic,
    hang_signs,
    incidents,
    last_checkpoint,
    link_signs,
    nodes,
    program_error,
    replays,
    searching,
)
from controller.core.changes import JobForgotten, NodeChecked, RanksDone
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.environments import MAX_CHANGES
from controller.core.events import CommandFinished, JobAdvanced, JobStalled
from controller.core.evidence import NO_FIRST_STEP_YET
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind, Wanted
from controller.core.node_events import WorkerExited
from controller.core.orders import (
    CommandRecord,
    ForgetJob,
    PushCheckpoint,
    RunSuite,
    StartWorkers,
    StopWorkers,
)
from controller.core.records import JobPlan, JobRecord
from controller.core.states import (
    AT_WORK,
    LIVE,
    TERMINAL,
    IncidentState,
    JobState,
)
from controller.core.verdict import is_follower
from outlast.failures import FailureClass
from outlast.worker_contract import WorkerExitCode

# What befalls a process or a node and leaves the ranks elsewhere as they were. A rank that stands
# still does not leave in time, and is killed.
_LEAVES_OTHERS_WELL = (
    EvidenceKind.WORKER_EXIT,
    EvidenceKind.WORKERS_MISSING,
    EvidenceKind.NODE_LOST,
    EvidenceKind.STALLED,
    EvidenceKind.DRAIN,
)
# Where the workers stand is all that can be known of such a fault.
_HANGS = (EvidenceKind.STALLED, EvidenceKind.NO_FIRST_STEP)


def worker_exited(ctx: Context, event: WorkerExited) -> None:
    """A rank ended: done, or a fault."""
    job = ctx.state.jobs.get(event.job_id)
    if job is None or event.attempt != job.attempt or job.state not in LIVE:
        return
    # Quick where it matters: thousands of ranks end at once.
    if nodes.placed(ctx, job, event.node) is None and event.node not in job.nodes:
        return
    if _is_done(job.plan, event):
        done = ctx.state.done.get(job.job_id, {})
        if event.rank in done:
            # Told again, as in every hello: it prolongs nothing.
            return
        ctx.record(RanksDone(job_id=job.job_id, ranks=(event.rank,)))
        if job.state in AT_WORK and last_checkpoint.are_steps_done(ctx, job):
            last_checkpoint.all_steps_done(ctx, job)
        return
    is_early = event.code == WorkerExitCode.STOPPED and event.fault_class is FailureClass.CLEAN
    if job.state is JobState.SUSPENDING and is_early:
        # All ranks agree on a stop: one may have ended before its agent was told of it.
        return
    if event.stopped:
        if job.state in AT_WORK:
            # Nobody here wanted it: the agent has been without a controller for too long.
            detail = f"the agent of {event.node} stopped its workers by itself"
            fault(ctx, job, attempts.sign(ctx, EvidenceKind.WORKERS_MISSING, event.node, detail))
        return
    sign = Evidence(
        kind=EvidenceKind.WORKER_EXIT,
        node=event.node,
        rank=event.rank,
        detail=event.detail,
        at_s=event.at_s,
        fault_class=event.fault_class,
        fingerprint=event.fingerprint or _code_of(job.plan, event),
        traceback=event.traceback,
        exit_code=event.code,
    )
    if event.code == 0 and job.plan.total_steps is not None:
        sign = program_error.ended_early(sign, event.completed_step, job.plan.total_steps)
    fault(ctx, job, sign)
    incidents.reached(ctx, ctx.state.jobs[job.job_id], event.completed_step)


def _is_done(plan: JobPlan, event: WorkerExited) -> bool:
    """Whether a rank has done all that it was to do.

    Only a script decides that by itself; one that is asked to stop may end in the same way.
    """
    if plan.total_steps is None:
        return event.code == 0 and not event.stopped
    return event.code == 0 and event.completed_step >= plan.total_steps


def _code_of(plan: JobPlan, event: WorkerExited) -> str:
    """Whatever a script means by an exit code, it means the same each time."""
    return f"exit code {event.code}" if plan.is_script and event.code > 0 else ""


def advanced(ctx: Context, event: JobAdvanced) -> None:
    """Every rank completed a step: the job runs, perhaps again."""
    job = ctx.state.jobs.get(event.job_id)
    if job is None or event.attempt != job.attempt or job.state not in AT_WORK:
        return
    if job.state is JobState.STARTING:
        attempts.close_starts(ctx, job)
        reason = f"{_since(job, event)}{elastic.in_words(job)}"
        # What was in use there is free now.
        fitting = tuple(known for known in job.misfits if known.node not in job.nodes)
        begun = len(job.chosen)
        job = replace(job, misfits=fitting, num_begun=begun, resumed_step=event.resumed_step)
        job = ctx.move_job(job, JobState.RUNNING, reason)
        job = _note_environment(ctx, job, event)
    incidents.advanced(ctx, replays.advanced(ctx, job, event), event)


def _since(job: JobRecord, event: JobAdvanced) -> str:
    if job.plan.is_script and event.completed_step < 1:
        ranks = job.plan.world_size
        return "its script runs" if ranks == 1 else f"its script runs on all {ranks} ranks"
    return f"training since step {event.resumed_step + 1}"


def _note_environment(ctx: Context, job: JobRecord, event: JobAdvanced) -> JobRecord:
    """Record what decides the bits of an attempt; say so where that has changed."""
    since = f"since step {event.resumed_step + 1} (attempt {event.attempt})"
    changes = tuple(f"{since}: {line}" for line in event.environment_changes)
    if changes:
        ctx.emit(
            Alert(
                summary=f"job {job.job_id}: its numeric environment changed; {'; '.join(changes)}"
            )
        )
        incident = ctx.incident_of(job)
        if incident is not None:
            ctx.note(incident, "environment", "; ".join(event.environment_changes))
    kept = (*job.environment_changes, *changes)[-MAX_CHANGES:]
    return ctx.put(
        replace(
            job,
            environment=event.environment,
            environment_changes=kept,
            data_left_out=event.data_left_out,
            num_samples=event.num_samples or job.num_samples,
        )
    )


def stalled(ctx: Context, event: JobStalled) -> None:
    job = ctx.state.jobs.get(event.job_id)
    if job is None or event.attempt != job.attempt or job.state not in AT_WORK:
        return
    if last_checkpoint.is_awaited(ctx, job):
        return
    if job.state is JobState.STARTING and ctx.blind_until_s is not None:
        # Nobody can have reported a first step.
        return
    for sign in hang_signs.signs_of(job, event, ctx.now_s, link_signs.known(ctx, job)):
        fault(ctx, ctx.state.jobs[job.job_id], sign)
    incidents.add_note(ctx, ctx.state.jobs[job.job_id], "last_operations", event.stood)


def fault(ctx: Context, job: JobRecord, evidence: Evidence) -> None:
    """Something is wrong with a job: note it, and stop what still runs."""
    if job.state in TERMINAL or job.state in (JobState.QUEUED, JobState.PAUSED):
        return
    if job.state in AT_WORK:
        job = incidents.open_for(ctx, job, evidence)
        for sign in job.lacking:
            incident = ctx.incident_of(job)
            assert incident is not None
            ctx.add_evidence(incident, sign)
        attempts.suspend(
            ctx,
            job,
            evidence.detail,
            # Nothing has failed yet: the present step can be kept.
            graceful=evidence.kind in (EvidenceKind.DRAIN, EvidenceKind.DETECTED),
            capture_stacks=evidence.kind in _HANGS,
            keep=job.plan.heals and evidence.kind in _LEAVES_OTHERS_WELL,
        )
        return
    incident = ctx.incident_of(job)
    if job.state is JobState.SUSPENDING and (
        incident is None or incident.state is not IncidentState.EVIDENCE
    ):
        # The workers are being stopped for the user, or for an agent that leaves, and not for the
        # older incident. Some lose the others meanwhile.
        if not is_follower(evidence) and (job.wanted is not Wanted.CANCEL or _is_of_node(evidence)):
            incidents.open_for(ctx, job, evidence)
    elif incident is not None:
        ctx.add_evidence(incident, evidence)


def _is_of_node(evidence: Evidence) -> bool:
    """Whether a node is out of reach: of what else happens to a job that ends, nothing follows."""
    return evidence.kind in (EvidenceKind.NODE_LOST, EvidenceKind.NOT_STOPPED)


def command_finished(ctx: Context, record: CommandRecord, event: CommandFinished) -> None:
    """An agent answered a command that was given for a job."""
    job = None if record.job is None else ctx.state.jobs.get(record.job)
    if job is None:
        return
    match record.command:
        case StartWorkers():
            if record.attempt == job.attempt and job.state in AT_WORK:
                _start_answered(ctx, job, record, event)
        case StopWorkers():
            if not event.ok:
                _not_stopped(ctx, job, record, event.detail)
            if record.attempt == job.attempt:
                incidents.add_stacks(ctx, ctx.state.jobs[job.job_id], event)
                incidents.reached(ctx, ctx.state.jobs[job.job_id], event.completed_step)
                _stopped_to_grow(ctx, ctx.state.jobs[job.job_id], event.completed_step)
        case RunSuite():
            _suite_finished(ctx, job, record, event)
        case PushCheckpoint():
            last_checkpoint.push_finished(ctx, job, record, event)
        case ForgetJob():
            if event.ok and record.node in job.held_by:
                ctx.record(JobForgotten(job_id=job.job_id, node=record.node))


def deadline_passed(ctx: Context, job: JobRecord) -> None:
    """The patience of the present state has ended."""
    if ctx.blind_until_s is not None:
        ctx.put(replace(job, deadline_s=ctx.blind_until_s))
        return
    match job.state:
        case JobState.PREFLIGHT:
            attempts.preflight_timed_out(ctx, job)
        case JobState.RUNNING if last_checkpoint.is_awaited(ctx, job):
            fault(ctx, job, last_checkpoint.not_stored(ctx, job))
        case JobState.STARTING:
            detail = f"no first step within {job.plan.first_step_timeout_s:g} s"
            sign = attempts.sign(ctx, EvidenceKind.NO_FIRST_STEP, None, detail)
            fault(ctx, job, replace(sign, fingerprint=NO_FIRST_STEP_YET))
        case JobState.SUSPENDING:
            for command in list(attempts.stops_pending(ctx, job)):
                detail = f"its workers were not stopped within {job.plan.stop_timeout_s:g} s"
                sign = attempts.sign(ctx, EvidenceKind.NOT_STOPPED, command.node, detail)
                # Each may change the job.
                fault(ctx, ctx.state.jobs[job.job_id], sign)
            ctx.put(replace(ctx.state.jobs[job.job_id], deadline_s=None))
        case JobState.DIAGNOSING:
            searching.give_up(ctx, job, "the checks took too long; nothing is known of any node")
            ctx.put(replace(job, deadline_s=None))
        case _:
            ctx.put(replace(job, deadline_s=None))


def _suite_finished(
    ctx: Context, job: JobRecord, record: CommandRecord, event: CommandFinished
) -> None:
    if job.state is JobState.PREFLIGHT and record.node in job.unchecked:
        passed = nodes.suite_passed(ctx, record, event, job)
        if passed is None:
            return
        incidents.add_finding(ctx, job, record.node, event.verdict or "error", event.detail)
        node = ctx.state.nodes[record.node]
        if passed:
            ctx.record(NodeChecked(job_id=job.job_id, node=record.node))
        else:
            attempts.exclude(ctx, job, node, f"failed preflight: {event.detail}")


def _stopped_to_grow(ctx: Context, job: JobRecord, step: int) -> None:
    """Some node's ranks have stopped after this step, for the job to go on with more."""
    if job.grow_step is not None and step > job.grow_step:
        ctx.put(replace(job, grow_step=step))


def _not_stopped(ctx: Context, job: JobRecord, record: CommandRecord, why: str) -> None:
    """A node cannot kill its workers: nothing may start there before its agent has."""
    node = ctx.state.nodes[record.node]
    ctx.put(replace(node, stuck=node.incarnation))
    detail = f"its workers could not be stopped: {why}"
    ctx.emit(Alert(summary=f"node {record.node}: {detail}; it may need a reboot"))
    if record.attempt == job.attempt and job.state is JobState.SUSPENDING:
        sign = attempts.sign(ctx, EvidenceKind.NOT_STOPPED, record.node, detail)
        fault(ctx, job, sign)


def _start_answered(
    ctx: Context, job: JobRecord, record: CommandRecord, event: CommandFinished
) -> None:
    """A node has started its ranks, or could not."""
    if not event.ok:
        sign = attempts.start_failure(ctx, record, event)
        if sign.fault_class is not FailureClass.MISSING:
            fault(ctx, job, sign)
            return
        # The job's mistake or this node's: the others' answers tell.
        job = ctx.put(replace(job, lacking=(*job.lacking, sign)))
    if job.lacking and not ctx.commands_of(StartWorkers, job=job.job_id):
        fault(ctx, job, job.lacking[0])
