"""The steps of a job: what it does next, seen from how things are.

`advance` is level-triggered: it looks at the job and the fleet as they are and
moves the job as far as it can go now. Handlers (`jobs`, `requests`, `losses`, `fleet`) note what
happened, so a repeated or late event changes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.core import (
    acting,
    attempts,
    elastic,
    last_checkpoint,
    leaving,
    looks,
    misfit,
    nodes,
    queue,
    searching,
    swapping,
    versions,
)
from controller.core.capacity import need_in_words
from controller.core.context import Context
from controller.core.effects import ProvisionNodes
from controller.core.frozen import replace
from controller.core.kinds import Action, Cause, EvidenceKind, Wanted
from controller.core.naming import names
from controller.core.orders import StopWorkers
from controller.core.records import NO_ATTEMPT, JobRecord, NodeRecord
from controller.core.states import IncidentState, JobState, NodeState
from controller.core.verdict import first_failure
from outlast.ids import JobId, NodeId

# A job passes through at most these many states in one go.
_MAX_MOVES = 12


def advance(ctx: Context, job_id: JobId) -> None:
    """Move a job as far as it can go now."""
    for _ in range(_MAX_MOVES):
        job = ctx.state.jobs[job_id]
        if job_id in ctx.looks:
            if looks.may_wait(ctx, job):
                return
            del ctx.looks[job_id]
        step = _STEPS.get(job.state)
        if step is None or not step(ctx, job):
            return


def _leave_queue(ctx: Context, job: JobRecord) -> bool:
    if job.plan.sizes and queue.over_quota(ctx, job):
        job = elastic.shrink_in_queue(ctx, job, queue.turns(ctx).left_of_quota(job))
    over = queue.over_quota(ctx, job)
    if bool(over) is not job.held_back:
        if not over:
            ctx.allowed_s[job.job_id] = ctx.now_s
        job = ctx.put(replace(job, held_back=bool(over)))
    if over:
        ctx.explain(job, f"waiting: {over}")
        return False
    ahead, kept = queue.kept_for_others(ctx, job)
    num_free = sum(node.node not in kept for node in nodes.free_nodes(ctx, job))
    if num_free < job.plan.nodes:
        job = elastic.shrink_in_queue(ctx, job, num_free)
    if num_free < job.plan.nodes:
        why = "for its first start" if job.attempt == NO_ATTEMPT else "free"
        job = ctx.put(replace(job, deadline_s=_wait_until_s(ctx, job)))
        reason = _shortage(ctx, job, num_free, why)
        if ahead:
            reason = f"waiting behind {ahead}, for which free nodes are kept: {reason}"
        elif makes_room := queue.make_room(ctx, job, num_free):
            reason = f"waiting for {makes_room} to make room: {reason}"
        ctx.explain(ctx.state.jobs[job.job_id], reason)
        looks.looked(ctx, job.job_id, job.plan.nodes - num_free)
        # One that had not started yet has given its nodes back at once.
        return not ahead and len(nodes.free_nodes(ctx, job)) > num_free
    # It takes them at once, before anybody else can.
    job = ctx.move_job(job, JobState.PROVISIONING, "nodes are free")
    attempts.fill_places(ctx, job, kept)
    return True


def _provision(ctx: Context, job: JobRecord) -> bool:
    job = attempts.fill_places(ctx, job)
    if None in job.nodes:
        job = elastic.shrink(ctx, job)
    missing = [node for node in job.nodes if node is None]
    if not missing and (away := attempts.away(ctx, job)):
        ctx.explain(job, f"waiting for the agent of {names(away)} to connect")
        looks.looked(ctx, job.job_id, len(away))
        return False
    if not missing and (differing := versions.in_words(ctx, job)):
        ctx.explain(job, _differing(differing))
        looks.looked(ctx, job.job_id, 1)
        return False
    if not missing:
        deadline_s = ctx.now_s + job.plan.preflight_timeout_s
        job = ctx.move_job(
            job,
            JobState.PREFLIGHT,
            f"checking {names(job.unchecked) or 'nothing'} before use",
            deadline_s=deadline_s,
        )
        for node_id in job.unchecked:
            node = ctx.state.nodes[node_id]
            nodes.run_suite(ctx, node, "preflight", job.plan.preflight_timeout_s, job)
        return True
    have = job.plan.nodes - len(missing)
    reason = _shortage(ctx, job, have, _missing_why(ctx, job))
    if makes_room := queue.make_room(ctx, job, have):
        reason = f"waiting for {makes_room} to make room: {reason}"
    job = ctx.put(replace(job, deadline_s=_wait_until_s(ctx, job)))
    if reason != job.reason:
        ctx.explain(job, reason)
        ctx.emit(
            ProvisionNodes(count=len(missing), workers=job.plan.workers_per_node, reason=reason)
        )
    looks.looked(ctx, job.job_id, len(missing))
    return bool(makes_room) and bool(nodes.free_nodes(ctx, job))


def _pass_preflight(ctx: Context, job: JobRecord) -> bool:
    if ctx.state.index.num_held.get(job.job_id, 0) < job.plan.nodes:
        ctx.move_job(job, JobState.PROVISIONING, "a node was lost before the start")
        return True
    if job.unchecked:
        return False
    if attempts.away(ctx, job):
        ctx.move_job(job, JobState.PROVISIONING, "an agent is away before the start")
        return True
    if differing := versions.in_words(ctx, job):
        ctx.move_job(job, JobState.PROVISIONING, _differing(differing))
        return True
    attempts.start(
        ctx, job, "every node passed its checks" if job.plan.preflight else "nodes are free"
    )
    return True


def _restart(ctx: Context, job: JobRecord) -> bool:
    if None in job.nodes:
        ctx.move_job(job, JobState.PROVISIONING, job.reason)
        return True
    if any(nodes.placed(ctx, job, node) is None for node in job.nodes):
        ctx.move_job(job, JobState.PROVISIONING, "a node was lost before the restart")
        return True
    if attempts.away(ctx, job):
        ctx.move_job(job, JobState.PROVISIONING, job.reason)
        return True
    if differing := versions.in_words(ctx, job):
        ctx.move_job(job, JobState.PROVISIONING, _differing(differing))
        return True
    attempts.start(ctx, job, "restarting in place")
    return True


def _leave_running(ctx: Context, job: JobRecord) -> bool:
    """All steps are done and the last checkpoint may have come to storage; or it can grow."""
    if last_checkpoint.is_awaited(ctx, job):
        return last_checkpoint.succeed_if_stored(ctx, job)
    return elastic.in_time(ctx, job)


def _end_pause(ctx: Context, job: JobRecord) -> bool:
    """Nothing is left to train: what a paused job lacked was its last checkpoint."""
    if job.plan.last_checkpoint_s <= 0 or last_checkpoint.is_pushing(ctx, job):
        return False
    return last_checkpoint.succeed_if_stored(ctx, job)


def _conclude(ctx: Context, job: JobRecord) -> bool:
    """All workers are stopped, or known to be out of reach."""
    if attempts.is_stopping(ctx, job):
        return False
    if job.wanted is Wanted.CANCEL:
        attempts.finish(ctx, job, JobState.CANCELLED, "cancelled by the user")
        return True
    if job.wanted is Wanted.PAUSE:
        attempts.pause(ctx, job, "paused by the user")
        return True
    incident = ctx.incident_of(job)
    if incident is not None and incident.state is IncidentState.EVIDENCE:
        acting.act(ctx, ctx.put(replace(job, grow_step=None, yields_to=None)), incident)
    elif job.yields_to is not None:
        return queue.leave(ctx, job)
    elif job.grow_step is not None:
        return elastic.grow(ctx, job)
    else:
        # Nothing has failed: an agent was stopped in order, or a pause was called off before the
        # workers had stopped.
        left = [ctx.state.nodes[each] for each in attempts.away(ctx, job)]
        reasons = [leaving.in_words(node) for node in left if node.has_left]
        reason = next(iter(reasons), "the workers were stopped, and are started again")
        ctx.move_job(job, JobState.RESTARTING, reason)
    return True


def _finish_diagnosis(ctx: Context, job: JobRecord) -> bool:
    lost = [node for node in job.nodes if nodes.placed(ctx, job, node) is None]
    incident = ctx.incident_of(job)
    assert incident is not None, f"job {job.job_id} is DIAGNOSING without an incident"
    if searching.is_open(incident):
        if not lost:
            # No check runs beside processes that were kept.
            if not attempts.is_stopping(ctx, job):
                searching.ask(ctx, job, incident)
            return False
        searching.give_up(ctx, job, f"{lost[0] or 'a node'} was lost while the others were checked")
    incident = ctx.state.incidents[incident.incident]
    acting.act(ctx, job, ctx.move_incident(incident, IncidentState.EVIDENCE))
    return True


def _replace_nodes(ctx: Context, job: JobRecord) -> bool:
    incident = ctx.incident_of(job)
    assert incident is not None, f"job {job.job_id} is REPAIRING without an incident"
    signs: dict[NodeId | None, set[EvidenceKind]] = {}
    for item in incident.evidence:
        signs.setdefault(item.node, set()).add(item.kind)
    for node_id in incident.culprits:
        node = nodes.placed(ctx, job, node_id)
        if node is None:
            continue
        if node.state is NodeState.DRAINING:
            ctx.move_node(replace(node, job=None), NodeState.DRAINED, "drained by a person")
        elif incident.cause is Cause.NODE_DRAINED:
            # The person called the drain off in time, and the node has done nothing wrong.
            continue
        elif incident.action is Action.SWAP_NODES:
            swapping.take_out(ctx, node, incident)
        elif _is_back(ctx, signs.get(node_id, set()), node):
            job = ctx.state.jobs[job.job_id]
            if node_id not in job.unchecked:
                incident = ctx.note(incident, "back", f"{node_id} is heard again; checking it")
                ctx.put(replace(job, unchecked=(*job.unchecked, node_id)))
        elif not nodes.quarantine(ctx, node, f"{incident.incident}: {incident.reason}"):
            ctx.put(
                replace(
                    ctx.state.jobs[job.job_id],
                    deadline_s=nodes.breaker_opens_s(ctx),
                    reason=f"replacing {node_id} waits: as many nodes as the breaker allows were "
                    f"quarantined within {ctx.settings.breaker_window_s / 60:g} min; it goes on "
                    "when the first of them is longer ago than that",
                )
            )
            return False
    job = attempts.fill_places(ctx, ctx.state.jobs[job.job_id])
    ctx.move_job(job, JobState.PROVISIONING, "the bad nodes are out")
    return True


def _is_back(ctx: Context, kinds: set[EvidenceKind], node: NodeRecord) -> bool:
    """Whether a node that was only out of reach has come back and stopped its workers.

    `kinds` are those of the signs against it.
    """
    unreachable = (EvidenceKind.NODE_LOST, EvidenceKind.NOT_STOPPED)
    view = ctx.view(node.node)
    return (
        all(kind in (*unreachable, EvidenceKind.WORKER_EXIT) for kind in kinds)
        and any(kind in unreachable for kind in kinds)
        and view.connected
        and not view.late
        and not node.is_stuck
        and not ctx.commands_of(StopWorkers, node=node.node)
    )


_STEPS: dict[JobState, Callable[[Context, JobRecord], bool]] = {
    JobState.QUEUED: _leave_queue,
    JobState.PROVISIONING: _provision,
    JobState.PREFLIGHT: _pass_preflight,
    JobState.RESTARTING: _restart,
    JobState.RUNNING: _leave_running,
    JobState.PAUSED: _end_pause,
    JobState.SUSPENDING: _conclude,
    JobState.DIAGNOSING: _finish_diagnosis,
    JobState.REPAIRING: _replace_nodes,
}


def _differing(in_words: str) -> str:
    return f"waiting for one version of Outlast on its nodes, whose agents run {in_words}"


def _wait_until_s(ctx: Context, job: JobRecord) -> float | None:
    """When the job should look again, though nothing has happened."""
    again_s = misfit.asked_again_s(job, ctx.now_s)
    times = [at_s for at_s in (job.deadline_s, again_s) if at_s is not None]
    return min(times, default=None)


def _shortage(ctx: Context, job: JobRecord, have: int, why: str) -> str:
    plan = job.plan
    advice = "add one with `outlast agent`, or return one with `outlast nodes uncordon`"
    others = nodes.held_by_others(ctx, job)
    if others:
        advice = f"{others}; it starts once enough are free; to have more, {advice}"
    unfit = misfit.in_words(ctx, job)
    each = f"{plan.workers_per_node} worker places"
    if unfit:
        each, advice = need_in_words(plan.workers_per_node, plan.need), misfit.ADVICE
    return (
        f"waiting for {plan.nodes - have} more node(s): needs {plan.nodes} with {each} each, has "
        f"{have} {why}; " + (f"{unfit}; " if unfit else "") + (ctx.awaited or advice)
    )


def _missing_why(ctx: Context, job: JobRecord) -> str:
    incident = ctx.incident_of(job)
    if incident is None or not incident.culprits:
        return "that are healthy"
    failure = first_failure(incident.evidence)
    because = incident.reason if failure is None else f"{incident.reason} ({failure.detail})"
    return f"that are healthy ({because})"
