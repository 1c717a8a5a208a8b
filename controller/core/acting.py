"""Deciding on an incident whose workers are stopped, and setting about it."""

from __future__ import annotations

from controller.core import attempts, causes, misfit, nodes, replays, searching, spares, swapping
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.frozen import replace
from controller.core.incident_record import IncidentRecord
from controller.core.kinds import Action, Cause, Wanted
from controller.core.policy import decide
from controller.core.records import JobRecord
from controller.core.states import IncidentState, JobState, NodeState
from controller.core.verdict import (
    BLAMED_BEFORE,
    STEADY_S,
    PolicyInput,
    PolicyVerdict,
    first_failure,
)
from outlast.ids import NodeId, incident_id


def act(ctx: Context, job: JobRecord, incident: IncidentRecord) -> None:
    """Decide on an incident and set about it."""
    verdict = decide(_facts_for(ctx, job, incident))
    incident = ctx.move_incident(
        replace(
            incident,
            cause=verdict.cause,
            action=verdict.action,
            reason=verdict.reason,
            culprits=verdict.culprits,
        ),
        IncidentState.VERDICT,
    )
    incident = ctx.note(incident, "verdict", verdict.reason, is_verdict=True)
    if verdict.action in (Action.DIAGNOSE, Action.PAUSE):
        attempts.end_kept(ctx, job)
    if verdict.action is Action.DIAGNOSE:
        _diagnose(ctx, job, verdict)
        return
    job = _charged(ctx, job, incident, verdict)
    if verdict.action is Action.FAIL:
        failure = first_failure(incident.evidence)
        code = None if failure is None else failure.exit_code
        failed = replace(job, error=verdict.error, exit_code=code)
        attempts.finish(ctx, failed, JobState.FAILED, verdict.reason)
        return
    if verdict.action is Action.PAUSE:
        job = ctx.put(replace(job, wanted=Wanted.PAUSE, needs_person=True))
        ctx.emit(Alert(summary=f"job {job.job_id} is paused: {verdict.reason}"))
        attempts.pause(ctx, job, verdict.reason)
        return
    ctx.move_incident(ctx.state.incidents[incident.incident], IncidentState.ACTING)
    job = replays.decided(ctx, job, incident, verdict)
    if verdict.cause is Cause.MISFIT:
        job = misfit.leave(ctx, job, incident.evidence)
    if verdict.action in (Action.REPLACE_NODES, Action.SWAP_NODES):
        ctx.move_job(job, JobState.REPAIRING, verdict.reason)
    else:
        _suspect(ctx, job, verdict)
        ctx.move_job(job, JobState.RESTARTING, verdict.reason)


def _charged(
    ctx: Context, job: JobRecord, incident: IncidentRecord, verdict: PolicyVerdict
) -> JobRecord:
    """The job with what the fault costs of its budget, and by what it will be known again."""
    comes_back = (
        verdict.fingerprint != ""
        and verdict.fingerprint == job.last_fingerprint
        and incident.fault_step <= job.last_fault_step
    )
    if _was_overcome(job, incident, verdict):
        job = replace(job, retry_left=job.plan.retry_budget, faults_in_row=0)
    return ctx.put(
        replace(
            job,
            same_failures=job.same_failures + 1 if comes_back else 0,
            retry_left=max(0, job.retry_left - verdict.spends_retry),
            faults_in_row=job.faults_in_row + verdict.spends_retry,
            last_fingerprint=verdict.fingerprint,
            last_fault_step=incident.fault_step,
            high_step=max(0, incident.fault_step),
        )
    )


def _was_overcome(job: JobRecord, incident: IncidentRecord, verdict: PolicyVerdict) -> bool:
    """Whether a script had put the faults before this one behind it.

    It may commit no checkpoint that would say so. One that fails in the same way each time has
    not, however long it runs until then.
    """
    is_same = verdict.fingerprint != "" and verdict.fingerprint == job.last_fingerprint
    return job.plan.is_script and incident.ran_s >= STEADY_S and not is_same


def _facts_for(ctx: Context, job: JobRecord, incident: IncidentRecord) -> PolicyInput:
    free = nodes.free_nodes(ctx, job)
    return PolicyInput(
        evidence=incident.evidence,
        findings=incident.findings,
        bad_links=incident.bad_links,
        figures=incident.figures,
        corrupt=incident.corrupt,
        suspects=tuple(
            node.node
            for node in ctx.state.nodes.values()
            if node.job == job.job_id and node.state is NodeState.SUSPECT
        ),
        blamed_before=_blamed_before(ctx, job),
        fault_step=incident.fault_step,
        total_steps=job.plan.total_steps,
        ran_s=incident.ran_s,
        last_fingerprint=job.last_fingerprint,
        last_fault_step=job.last_fault_step,
        same_failures=job.same_failures,
        faults_in_row=job.faults_in_row,
        ladder=job.plan.ladder,
        in_place_restarts=job.plan.in_place_restarts,
        retry_left=job.retry_left,
        retry_program_errors=job.plan.retry_program_errors,
        committed_step=job.committed_step,
        computed_on=replays.computed_on(job, incident),
        replayed_step=job.replayed_step,
        skipped=job.skipped,
        unreproduced=job.unreproduced,
        non_finite_again=job.plan.non_finite_again,
        rollback_steps=job.plan.rollback_steps,
        free_nodes=len(free),
        ready_standbys=sum(spares.is_ready(ctx, job, node) for node in free),
        state_elsewhere=swapping.state_elsewhere(ctx, job, incident),
        may_fit=misfit.may_fit(ctx, job, incident.evidence),
        nodes_in_words=misfit.nodes_in_words(ctx)
        if misfit.speaks_of_nodes(incident.evidence)
        else "",
        num_nodes=job.plan.nodes,
        lacking_before=tuple(known.node for known in job.misfits if known.is_missing_file),
    )


def _blamed_before(ctx: Context, job: JobRecord) -> tuple[NodeId, ...]:
    """Nodes on which each of the last faults before this one began, all such as machines make."""
    faults: list[IncidentRecord] = []
    # What was only logged stopped nothing.
    for number in range(job.num_incidents, 0, -1):
        incident = ctx.state.incidents.get(incident_id(job.job_id, number))
        if incident is None or len(faults) == BLAMED_BEFORE:
            break
        if incident.action is not None and incident.incident != job.incident:
            faults.append(incident)
    if len(faults) < BLAMED_BEFORE or any(each.cause not in causes.OF_MACHINES for each in faults):
        return ()
    last, other = faults
    return tuple(node for node in last.culprits if node in other.culprits)


def _diagnose(ctx: Context, job: JobRecord, verdict: PolicyVerdict) -> None:
    job = ctx.move_job(
        job,
        JobState.DIAGNOSING,
        verdict.reason,
        deadline_s=ctx.now_s + job.plan.diagnose_timeout_s,
    )
    searching.begin(ctx, job)


def _suspect(ctx: Context, job: JobRecord, verdict: PolicyVerdict) -> None:
    """Remember where the fault began: a second one there is looked into."""
    for node_id in verdict.culprits:
        node = nodes.placed(ctx, job, node_id)
        if node is not None and node.state is NodeState.ASSIGNED:
            ctx.move_node(
                node,
                NodeState.SUSPECT,
                verdict.reason,
                timer_s=ctx.now_s + ctx.settings.suspect_s,
            )
