"""Agents that end in order: what was planned is no fault of a node, and costs no retry.

An agent that is asked to end says so before it stops its workers, and its successor says so
once more, should nobody have listened. The job's other workers are stopped without an incident,
its nodes keep their places, and it goes on once all of them are here again. A node that does not
come back within `heartbeat_silent_s` is let go without blame, and another may take its place.
"""

from __future__ import annotations

from controller.core import attempts
from controller.core.context import Context
from controller.core.events import NodeLeft
from controller.core.records import (
    EvidenceKind,
    JobRecord,
    NodeRecord,
    RunSuite,
    StartWorkers,
    StopWorkers,
)
from controller.core.states import AT_WORK, FREE, PLACED, IncidentState, JobState, NodeState


def left(ctx: Context, event: NodeLeft) -> None:
    """An agent ends because it was asked to, and takes its workers along."""
    node = ctx.state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation or node.has_left:
        return
    node = ctx.put_node(node, left=event.incarnation)
    why = "its agent was stopped in order, and its workers with it"
    stopping = ctx.commands_of(StopWorkers, node=node.node)
    for command in (*stopping, *ctx.commands_of(StartWorkers, node=node.node)):
        ctx.close_command(command.command_id, why)
    if node.job is None:
        return
    job = ctx.state.jobs[node.job]
    if job.state in AT_WORK:
        attempts.suspend(ctx, job, in_words(node), graceful=False)
    elif job.state is JobState.PREFLIGHT:
        # Its checks have ended with it, and the patience with them must not run on meanwhile.
        for check in ctx.commands_of(RunSuite, node=node.node, job=job.job_id):
            ctx.close_command(check.command_id, why)
        ctx.move_job(job, JobState.PROVISIONING, in_words(node))
    elif any((stop.job, stop.attempt) == (job.job_id, job.attempt) for stop in stopping):
        _note(ctx, job, node)


def in_words(node: NodeRecord) -> str:
    return f"the agent of {node.node} was stopped in order"


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
