"""Nodes: who is there, who is excluded until when, who stands by.

People, checks and time bring a node from one state to the next here; whether one
that is silent or gone is lost is decided in `losses`.
"""

from __future__ import annotations

from controller.core import attempts, jobs, leaving, losses, nodes, spares, validating
from controller.core.capacity import Capacity
from controller.core.changes import NodeForgotten
from controller.core.context import Context, NodeView
from controller.core.events import CommandFinished
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind
from controller.core.node_events import (
    NodeClosed,
    NodeCordonRequested,
    NodeDrainRequested,
    NodeForgetRequested,
    NodeJoined,
    NodeLeft,
    NodeLocated,
    NodeReleased,
    NodeReplaced,
    NodeUncordonRequested,
)
from controller.core.orders import CommandRecord, StartWorkers, StopWorkers
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import (
    AT_WORK,
    AWAY,
    EXCLUDED,
    FREE,
    LIVE,
    IncidentState,
    JobState,
    NodeState,
)
from outlast.ids import CommandId, JobId, NodeId

# Of a node: an agent that comes back does so soon after the one that took its place.
MAX_SUPERSEDED = 4


def joined(ctx: Context, event: NodeJoined) -> None:
    """An agent is here, with the truth about its node."""
    before = ctx.view(event.node)
    ctx.node_views[event.node] = NodeView(
        connected=True, closed=before.closed, topology=before.topology, version=event.version
    )
    ctx.silent.pop(event.node, None)
    ctx.saw(event.node)
    losses.trust_ourselves_again(ctx)
    if event.predecessor:
        leaving.left(ctx, NodeLeft(node=event.node, incarnation=event.predecessor))
    known = ctx.state.nodes.get(event.node)
    _put_joined(ctx, known, event)
    is_new = known is not None and known.incarnation != event.incarnation
    restarting = _drop_starts(ctx, event.node) if is_new else []
    for command_id in list(ctx.state.index.of_node.get(event.node, ())):
        ctx.send(ctx.state.commands[command_id])
    for job_id in list(ctx.state.index.held_jobs):
        job = ctx.state.jobs[job_id]
        if event.node in job.held_by:
            attempts.forget_on(ctx, job, event.node)
    away_since_s = before.late_since_s if not before.connected else 0.0
    since_s = away_since_s or ctx.now_s
    _reconcile_workers(ctx, event, is_new=is_new, since_s=since_s, reported=restarting)


def _put_joined(ctx: Context, known: NodeRecord | None, event: NodeJoined) -> None:
    """Note what its agent says of a node; one that was away for good comes back."""
    if known is None:
        known = NodeRecord(
            node=event.node,
            state=NodeState.READY,
            since_s=ctx.now_s,
            reason="joined",
            incarnation="",
            address="",
            rendezvous_port=0,
            workers=0,
        )
    superseded = known.superseded
    if known.incarnation not in ("", event.incarnation):
        superseded = (*superseded, known.incarnation)[-MAX_SUPERSEDED:]
    node = ctx.put(
        replace(
            known,
            incarnation=event.incarnation,
            superseded=superseded,
            address=event.address,
            rendezvous_port=event.rendezvous_port,
            workers=event.workers,
            replica_port=event.replica_port,
            replica_token=event.replica_token,
            # Its host may have been started anew.
            checked_s=known.checked_s if known.incarnation == event.incarnation else None,
            capacity=_at(event.capacity, ctx.view(event.node).topology or _known_place(ctx, known)),
        )
    )
    if node.state is NodeState.RETIRED:
        validating.begin(ctx, node, "it joined again after it had been given up")
    elif node.state is NodeState.RELEASED:
        ctx.move_node(node, NodeState.READY, "joined")


def _drop_starts(ctx: Context, node_id: NodeId) -> list[JobId]:
    """Give up orders to start that were for the agent before; the jobs that start anew for it.

    The endpoint of the rendezvous may be the dead agent's, and whether it had begun is not known.
    """
    restarting: list[JobId] = []
    for command in ctx.commands_of(StartWorkers, node=node_id):
        ctx.close_command(command.command_id, "it was for an agent that is gone")
        job = None if command.job is None else ctx.state.jobs.get(command.job)
        if job is not None and job.state in AT_WORK and command.attempt == job.attempt:
            detail = f"the agent of {node_id} was restarted before its workers had started"
            sign = attempts.sign(ctx, EvidenceKind.START_LOST, node_id, detail)
            jobs.fault(ctx, job, sign)
            restarting.append(job.job_id)
    return restarting


def closed(ctx: Context, event: NodeClosed) -> None:
    ctx.view(event.node).closed = event.reason
    ctx.saw(event.node)


def located(ctx: Context, event: NodeLocated) -> None:
    """The cluster knows better than an agent where its host stands."""
    view, node = ctx.view(event.node), ctx.state.nodes.get(event.node)
    view.topology = event.topology
    if node is None and view == NodeView():
        # A host of the cluster that has gone, and never had an agent.
        del ctx.node_views[event.node]
    elif node is not None and node.capacity is not None and node.state not in AWAY:
        ctx.put(replace(node, capacity=replace(node.capacity, topology=event.topology)))


def _known_place(ctx: Context, known: NodeRecord) -> str:
    """What the cluster has said before: after a restart its word may come behind the agent's."""
    is_hosts = ctx.settings.brings_nodes and known.capacity is not None
    return known.capacity.topology if is_hosts and known.capacity is not None else ""


def _at(capacity: Capacity | None, topology: str) -> Capacity | None:
    """What a node has, with what the cluster says of its place, if it says that."""
    if capacity is None or not topology:
        return capacity
    return replace(capacity, topology=topology)


def released(ctx: Context, event: NodeReleased) -> None:
    """The cluster may have a node back when nobody uses it and nothing is asked of it."""
    node = ctx.state.nodes.get(event.node)
    asked = bool(ctx.state.index.of_node.get(event.node))
    if node is not None and node.state in FREE and not asked:
        nodes.release(ctx, node, "no job needs it")


def replaced(ctx: Context, event: NodeReplaced) -> None:
    """A new machine under an old name owes nothing for its predecessor."""
    node = ctx.state.nodes.get(event.node)
    if node is not None and node.state in (NodeState.RETIRED, NodeState.REPAIRING):
        nodes.release(ctx, node, "another machine has its name")


def cordon_requested(ctx: Context, event: NodeCordonRequested) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is not None:
        ctx.put(replace(node, cordoned=True))


def uncordon_requested(ctx: Context, event: NodeUncordonRequested) -> None:
    """A person's word ends a cordon, a quarantine or a retirement."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    was_cordoned = node.cordoned
    node = ctx.put(replace(node, cordoned=False, stuck=""))
    if node.state is NodeState.READY and was_cordoned:
        # Why it was cordoned is no reason to be ready.
        ctx.put(replace(node, reason="a person returned it"))
    elif node.state in EXCLUDED and ctx.connected(node.node):
        nodes.close_commands(ctx, node.node, "a person returned the node", keep_stops=True)
        ctx.move_node(
            replace(node, passes=0, quarantine="", quarantined_s=None),
            NodeState.READY,
            "a person returned it",
        )
    elif node.state in EXCLUDED and node.state is not NodeState.RELEASED:
        # Nobody is there to be used, or to be judged silent; it is free once it joins.
        nodes.release(ctx, node, "a person returned it")
    elif node.state is NodeState.DRAINING and node.job is not None:
        ctx.move_node(node, NodeState.ASSIGNED, "a person called the drain off")


def forget_requested(ctx: Context, event: NodeForgetRequested) -> None:
    """A person wants a node off the list, with all that was held against it."""
    if why_not_forgotten(ctx, event.node):
        return
    nodes.close_commands(ctx, event.node, "the node is forgotten", keep_stops=False)
    nodes.drop_from_jobs(ctx, event.node)
    ctx.record(NodeForgotten(node=event.node))
    # The host may still exist, and the cluster reports its location only once.
    where = ctx.view(event.node).topology
    for table in (ctx.node_views, ctx.quiet, ctx.silent):
        table.pop(event.node, None)
    if where:
        ctx.view(event.node).topology = where


def why_not_forgotten(ctx: Context, node_id: NodeId) -> str:
    """Why a node has to stay on the list; "" when it need not."""
    node = ctx.state.nodes.get(node_id)
    if node is None:
        return "it is not there"
    if ctx.connected(node_id):
        return "it is connected; stop its agent first"
    job = next((each.job_id for each in ctx.state.live_jobs() if node_id in each.nodes), None)
    if job is not None:
        return f"it has ranks of job {job}"
    if node.state not in AWAY:
        return f"it is {node.state}; only retired and released nodes can be forgotten"
    return ""


def drain_requested(ctx: Context, event: NodeDrainRequested) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    node = ctx.put(replace(node, cordoned=True))
    if node.state in (*FREE, NodeState.VALIDATING):
        nodes.close_commands(ctx, node.node, "a person drains the node", keep_stops=True)
        ctx.move_node(node, NodeState.DRAINED, "drained by a person")
    elif node.state in (NodeState.ASSIGNED, NodeState.SUSPECT) and node.job is not None:
        node = ctx.move_node(node, NodeState.DRAINING, "drained by a person")
        jobs.fault(
            ctx,
            ctx.state.jobs[JobId(str(node.job))],
            Evidence(
                kind=EvidenceKind.DRAIN,
                node=node.node,
                rank=None,
                detail="a person drains the node",
                at_s=ctx.now_s,
            ),
        )


def suite_finished(ctx: Context, record: CommandRecord, event: CommandFinished) -> None:
    """A suite that no job waits for has ended: a validation or a standby's check."""
    if ctx.state.nodes[record.node].state not in (*FREE, NodeState.VALIDATING):
        return
    passed = nodes.suite_passed(ctx, record, event)
    node = ctx.state.nodes[record.node]
    if passed is None:
        return
    if node.state is NodeState.VALIDATING:
        validating.ended(ctx, node, passed=passed, detail=event.detail)
    elif not passed:
        nodes.keep_out(ctx, node, f"checks failed while it was free: {event.detail}")


def tend(ctx: Context) -> None:
    """Bring every node on that has only waited for time, a place or a check."""
    _let_time_pass(ctx)
    spares.keep(ctx)


def next_timer_s(ctx: Context) -> list[float]:
    """Timers still to come; one that has passed waits for something else by now."""
    timers = [node.timer_s for node in ctx.waiting_nodes() if node.timer_s is not None]
    return [at_s for at_s in (*timers, *spares.next_checks_s(ctx)) if at_s > ctx.now_s]


def _reconcile_workers(
    ctx: Context, event: NodeJoined, *, is_new: bool, since_s: float, reported: list[JobId]
) -> None:
    """Compare what runs on a node with what should: adopt, stop, or call it a fault.

    `is_new` says that the agent was restarted, some time after `since_s`; of the jobs `reported`
    nothing more need be said.
    """
    node_id = event.node
    reported = list(reported)
    for status in event.statuses:
        job = ctx.state.jobs.get(status.job_id)
        current = (
            job is not None
            and status.attempt == job.attempt
            and nodes.placed(ctx, job, node_id) is not None
        )
        if current and job is not None and job.state in LIVE:
            reported.append(status.job_id)
            if status.exit is not None:
                jobs.worker_exited(ctx, status.exit)
        elif status.exit is None:
            ctx.open_command(
                CommandId(f"{status.job_id}/a{status.attempt}/stop/{node_id}"),
                node_id,
                StopWorkers(graceful=False, timeout_s=10.0),
                job=status.job_id,
                attempt=status.attempt,
            )
    for job in ctx.state.live_jobs():
        if job.job_id in reported or not _had_workers(ctx, job, node_id, is_new=is_new):
            continue
        what = "was restarted, and its workers died with it" if is_new else "has no workers left"
        sign = attempts.sign(
            ctx, EvidenceKind.WORKERS_MISSING, node_id, f"the agent of {node_id} {what}"
        )
        jobs.fault(ctx, job, replace(sign, at_s=since_s))


def _had_workers(ctx: Context, job: JobRecord, node_id: NodeId, *, is_new: bool) -> bool:
    """Whether an agent that tells of no workers of a job must have had some."""
    if job.state in AT_WORK:
        asked = ctx.commands_of(StartWorkers, node=node_id, job=job.job_id)
        return node_id in job.nodes and not asked
    incident = ctx.incident_of(job)
    is_fault = incident is not None and incident.state is IncidentState.EVIDENCE
    # Its peers may have noticed before it was here again, but it had not been stopped by then.
    return (
        is_new
        and is_fault
        and job.state is JobState.SUSPENDING
        and any(
            stop.attempt == job.attempt
            for stop in ctx.commands_of(StopWorkers, node=node_id, job=job.job_id)
        )
    )


def _let_time_pass(ctx: Context) -> None:
    for node in ctx.waiting_nodes():
        due = node.timer_s is not None and node.timer_s <= ctx.now_s
        view = ctx.view(node.node)
        here = view.connected and not view.late
        if node.state is NodeState.QUARANTINED:
            stopping = ctx.commands_of(StopWorkers, node=node.node)
            if here and not stopping and not node.is_stuck:
                ctx.move_node(
                    node,
                    NodeState.DRAINED,
                    node.reason,
                    timer_s=ctx.now_s + ctx.settings.cooldown_s,
                )
            elif due and (view.silent or node.is_stuck):
                nodes.retire(ctx, node, f"never came back after: {node.reason}")
        elif node.state is NodeState.VALIDATING and due:
            validating.quarantine_in_time(ctx, node)
        elif node.state is NodeState.DRAINED and due and not node.cordoned:
            if here and not node.is_stuck:
                validating.begin(ctx, node, "its quarantine has cooled down")
            elif view.silent or node.is_stuck:
                nodes.retire(ctx, node, f"never came back after: {node.reason}")
        elif node.state in (*FREE, NodeState.VALIDATING) and view.silent:
            # Lost while a job that has ended since held it, or while the breaker was open.
            losses.judge(ctx, node.node)
        elif node.state in FREE and node.is_stuck:
            nodes.quarantine(ctx, node, "its workers could not be killed")
        elif node.state is NodeState.SUSPECT and due:
            ctx.move_node(node, NodeState.ASSIGNED, "no fault since it was suspected")
