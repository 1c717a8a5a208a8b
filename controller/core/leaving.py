"""Agents that end in order: what was planned is no fault of a node, and costs no retry.

An agent that is asked to end says so before it stops its workers, and its successor says so
once more, should nobody have listened. The job's other workers are stopped without an incident,
its nodes keep their places, and it goes on once all of them are here again. A node that does not
come back within `heartbeat_silent_s` is let go without blame, and another may take its place.

Somebody who stops the agent of one node again and again while jobs are at work there costs them
a restart each time. That is nobody's fault either, but people hear of it.
"""

from __future__ import annotations

from controller.core import attempts
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.frozen import replace
from controller.core.kinds import EvidenceKind
from controller.core.node_events import NodeLeft
from controller.core.orders import RunSuite, StartWorkers, StopWorkers
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import AT_WORK, FREE, PLACED, IncidentState, JobState, NodeState

# So many stops in an hour are no upgrade and no reboot.
MANY_STOPS = 3
STOPS_WINDOW_S = 3_600.0


def left(ctx: Context, event: NodeLeft) -> None:
    """An agent ends because it was asked to, and takes its workers along."""
    node = ctx.state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation or node.has_left:
        return
    node = _count(ctx, ctx.put(replace(node, left=event.incarnation)), is_ours=event.is_ours)
    why = "its agent was stopped in order, and its workers with it"
    stopping = ctx.commands_of(StopWorkers, node=node.node)
    for command in (*stopping, *ctx.commands_of(StartWorkers, node=node.node)):
        ctx.close_command(command.command_id, why)
    if node.job is None:
        return
    job = ctx.state.jobs[node.job]
    if job.state in AT_WORK:
        attempts.suspend(ctx, job, in_words(node), graceful=False, keep=job.plan.heals)
    elif job.state is JobState.PREFLIGHT:
        # Its checks have ended with it, and the patience with them must not run on meanwhile.
        for check in ctx.commands_of(RunSuite, node=node.node, job=job.job_id):
            ctx.close_command(check.command_id, why)
        ctx.move_job(job, JobState.PROVISIONING, in_words(node))
    elif any((stop.job, stop.attempt) == (job.job_id, job.attempt) for stop in stopping):
        _note(ctx, job, node)


def in_words(node: NodeRecord) -> str:
    return f"the agent of {node.node} was stopped in order"


def recent_stops(node: NodeRecord, now_s: float) -> tuple[float, ...]:
    """When the node's agent was stopped in order within the last hour, under a job."""
    return tuple(at_s for at_s in node.stops_s if at_s > now_s - STOPS_WINDOW_S)


def note(node: NodeRecord, now_s: float) -> str:
    """What people should know of a node whose agent is stopped again and again; "" of others."""
    count = len(recent_stops(node, now_s))
    if count < MANY_STOPS:
        return ""
    return (
        f"its agent was stopped in order {count} times within the hour while a job was at work "
        "there; find out who stops it, or drain the node"
    )


def _count(ctx: Context, node: NodeRecord, *, is_ours: bool) -> NodeRecord:
    """Keep a stop that nobody has announced to us, and alert when they are many."""
    job = None if node.job is None else ctx.state.jobs[node.job]
    is_announced = is_ours or node.cordoned or node.state is NodeState.DRAINING
    if is_announced or job is None or job.state not in AT_WORK:
        return node
    stops_s = (*recent_stops(node, ctx.now_s), ctx.now_s)[-MANY_STOPS * 4 :]
    node = ctx.put(replace(node, stops_s=stops_s))
    if len(stops_s) == MANY_STOPS:
        ctx.emit(Alert(summary=f"node {node.node}: {note(node, ctx.now_s)}"))
    return node


def may_be_let_go(node: NodeRecord) -> bool:
    """Whether a node that is not here any more has only been taken out of use in order.

    One in quarantine would get rid of it that way.
    """
    usable = (*FREE, *PLACED, NodeState.DRAINED)
    return node.has_left and not node.quarantine and node.state in usable


def _note(ctx: Context, job: JobRecord, node: NodeRecord) -> None:
    """Its peers may have been heard first, of connections that they lost to it."""
    incident = ctx.incident_of(job)
    is_fault = incident is not None and incident.state is IncidentState.EVIDENCE
    if incident is not None and is_fault and job.state is JobState.SUSPENDING:
        sign = attempts.sign(ctx, EvidenceKind.NODE_LEFT, node.node, in_words(node))
        ctx.add_evidence(incident, sign)
