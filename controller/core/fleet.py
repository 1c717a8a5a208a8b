"""Nodes: who is there, who is lost, who is excluded, who stands by.

Losing a node takes two independent signs (silence and the cluster's word) or a
long silence; if many nodes fall silent at once the controller suspects itself
and waits. How many nodes may be quarantined in a window is bounded.
"""

from __future__ import annotations

from controller.core import attempts, jobs, nodes
from controller.core.context import Context, Sight
from controller.core.effects import Alert, SendCommand
from controller.core.events import (
    CommandFinished,
    NodeBack,
    NodeClosed,
    NodeCordonRequested,
    NodeDisconnected,
    NodeDrainRequested,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeLate,
    NodeLost,
    NodeReleased,
    NodeSilent,
    NodeUncordonRequested,
    WorkerStatus,
)
from controller.core.facts import NodePut
from controller.core.records import (
    CommandRecord,
    Evidence,
    EvidenceKind,
    NodeRecord,
    RunSuite,
    StartWorkers,
    StopWorkers,
    Wanted,
)
from controller.core.states import AWAY, EXCLUDED, FREE, LIVE, TERMINAL, JobState, NodeState
from outlast.ids import CommandId, JobId, NodeId

# In these states a job has places but no workers, and nobody waits for its nodes to stop.
_NO_WORKERS = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.REPAIRING)
# A node that comes back from exclusion must pass this many suites in a row.
PASSES_TO_RETURN = 2


def joined(ctx: Context, event: NodeJoined) -> None:
    """An agent is here, with the truth about its node."""
    ctx.sights[event.node] = Sight(connected=True, closed=ctx.sight(event.node).closed)
    known = ctx.state.nodes.get(event.node)
    if known is None:
        node = NodeRecord(
            node=event.node,
            state=NodeState.READY,
            since_s=ctx.now_s,
            reason="joined",
            incarnation=event.incarnation,
            address=event.address,
            rendezvous_port=event.rendezvous_port,
            workers=event.workers,
        )
        ctx.record(NodePut(node=node))
    else:
        node = ctx.put_node(
            known,
            incarnation=event.incarnation,
            address=event.address,
            rendezvous_port=event.rendezvous_port,
            workers=event.workers,
        )
        if node.state is NodeState.RETIRED:
            _begin_validation(ctx, node, "it joined again after it had been given up")
        elif node.state is NodeState.RELEASED:
            ctx.move_node(node, NodeState.READY, "joined")
    for command in list(ctx.state.commands.values()):
        if command.node == event.node:
            ctx.emit(SendCommand(command=command))
    for job in list(ctx.state.jobs.values()):
        if job.state in TERMINAL and event.node in job.held_by:
            attempts.forget_on(ctx, job, event.node)
    _reconcile_workers(ctx, event.node, event.statuses)


def disconnected(ctx: Context, event: NodeDisconnected) -> None:
    sight = ctx.sight(event.node)
    if sight.connected:
        sight.connected = False
        sight.late_since_s = ctx.now_s
        _suspect_ourselves(ctx)
    judge(ctx, event.node)


def late(ctx: Context, event: NodeLate) -> None:
    sight = ctx.sight(event.node)
    if not sight.late:
        sight.late = True
        sight.late_since_s = ctx.now_s
        _suspect_ourselves(ctx)
    judge(ctx, event.node)


def lost(ctx: Context, event: NodeLost) -> None:
    sight = ctx.sight(event.node)
    sight.late = sight.lost = True
    judge(ctx, event.node)


def silent(ctx: Context, event: NodeSilent) -> None:
    sight = ctx.sight(event.node)
    sight.late = sight.lost = sight.silent = True
    judge(ctx, event.node)


def heard(ctx: Context, event: NodeHeard) -> None:
    sight = ctx.sight(event.node)
    sight.late = sight.lost = sight.silent = False
    _trust_ourselves_again(ctx)


def gone(ctx: Context, event: NodeGone) -> None:
    if event.node not in ctx.state.nodes:
        return
    sight = ctx.sight(event.node)
    sight.gone = event.detail or "the cluster reports it gone"
    sight.blames_host = event.blames_host
    judge(ctx, event.node)


def back(ctx: Context, event: NodeBack) -> None:
    ctx.sight(event.node).gone = ""


def closed(ctx: Context, event: NodeClosed) -> None:
    ctx.sight(event.node).closed = event.reason


def released(ctx: Context, event: NodeReleased) -> None:
    """The cluster may have a node back when nobody uses it and nothing is asked of it."""
    node = ctx.state.nodes.get(event.node)
    asked = any(command.node == event.node for command in ctx.state.commands.values())
    if node is not None and node.state in FREE and not asked:
        nodes.release(ctx, node, "no job needs it")


def cordon_requested(ctx: Context, event: NodeCordonRequested) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is not None:
        ctx.put_node(node, cordoned=True)


def uncordon_requested(ctx: Context, event: NodeUncordonRequested) -> None:
    """A person's word ends a cordon, a quarantine or a retirement."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    node = ctx.put_node(node, cordoned=False, stuck="")
    if node.state in EXCLUDED and ctx.connected(node.node):
        nodes.close_commands(ctx, node.node, "a person returned the node", keep_stops=True)
        ctx.move_node(node, NodeState.READY, "a person returned it", passes=0, quarantine="")
    elif node.state in EXCLUDED and node.state is not NodeState.RELEASED:
        # Nobody is there to be used, or to be judged silent; it is free once it joins.
        nodes.release(ctx, node, "a person returned it")
    elif node.state is NodeState.DRAINING and node.job is not None:
        ctx.move_node(node, NodeState.ASSIGNED, "a person called the drain off")


def drain_requested(ctx: Context, event: NodeDrainRequested) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    node = ctx.put_node(node, cordoned=True)
    if node.state in FREE:
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


def judge(ctx: Context, node_id: NodeId) -> None:
    """Decide whether a node is lost, from all that is seen of it."""
    node = ctx.state.nodes.get(node_id)
    sight = ctx.sight(node_id)
    if node is None or node.state in AWAY:
        return
    if sight.gone and (not sight.connected or sight.late):
        _lose(ctx, node, sight.gone)
    elif sight.silent and ctx.reconciling_until_s is None and ctx.blind_until_s is None:
        _lose(ctx, node, "no heartbeat for longer than heartbeat_silent_s")
    elif sight.lost and ctx.blind_until_s is None and _peers_saw_it(ctx, node):
        _lose(ctx, node, "no heartbeat, and ranks elsewhere lost their connection to it")


def end_reconciling(ctx: Context) -> None:
    """The agents have had their time to come back after a start."""
    ctx.reconciling_until_s = None
    # Those that fell silent meanwhile may all be hidden by one cut.
    _suspect_ourselves(ctx)
    judge_all(ctx)


def judge_all(ctx: Context) -> None:
    """Look at every node again, after a time in which nothing was to be judged."""
    for node_id in list(ctx.state.nodes):
        judge(ctx, node_id)


def suite_finished(ctx: Context, record: CommandRecord, event: CommandFinished) -> None:
    """A suite that no job waits for has ended: a validation or a standby's check."""
    passed = nodes.suite_passed(ctx, record, event)
    node = ctx.state.nodes[record.node]
    if passed is None:
        return
    if node.state is NodeState.VALIDATING:
        _validated(ctx, node, passed=passed, detail=event.detail)
    elif node.state in FREE and not passed:
        nodes.quarantine(ctx, node, f"checks failed while it was free: {event.detail}")


def tend(ctx: Context) -> None:
    """Bring every node on that has only waited for time, a place or a check."""
    _let_time_pass(ctx)
    _keep_standbys(ctx)


def next_timer_s(ctx: Context) -> list[float]:
    """Timers still to come; one that has passed waits for something else by now."""
    return [
        node.timer_s
        for node in ctx.state.nodes.values()
        if node.timer_s is not None and node.timer_s > ctx.now_s
    ]


def _reconcile_workers(ctx: Context, node_id: NodeId, statuses: tuple[WorkerStatus, ...]) -> None:
    """Compare what runs on a node with what should: adopt, stop, or call it a fault."""
    told: list[JobId] = []
    for status in statuses:
        job = ctx.state.jobs.get(status.job_id)
        current = (
            job is not None
            and status.attempt == job.attempt
            and nodes.placed(ctx, job, node_id) is not None
        )
        if current and job is not None and job.state in LIVE:
            told.append(status.job_id)
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
    for job in list(ctx.state.jobs.values()):
        started = job.state in (JobState.STARTING, JobState.RUNNING) and node_id in job.nodes
        asked = ctx.commands_of(StartWorkers, node=node_id, job=job.job_id)
        if started and not asked and job.job_id not in told:
            jobs.fault(
                ctx,
                job,
                Evidence(
                    kind=EvidenceKind.WORKERS_MISSING,
                    node=node_id,
                    rank=None,
                    detail=f"the agent of {node_id} started anew; its workers are gone",
                    at_s=ctx.now_s,
                ),
            )


def _quiet(ctx: Context) -> list[NodeId]:
    """Nodes in use that are silent, and that nobody else reports gone."""
    return [
        node.node
        for node in ctx.state.nodes.values()
        if node.state not in EXCLUDED
        and (ctx.sight(node.node).late or not ctx.sight(node.node).connected)
        and not ctx.sight(node.node).gone
    ]


def _blind_limit(ctx: Context) -> float:
    in_use = [node for node in ctx.state.nodes.values() if node.state not in EXCLUDED]
    share = ctx.settings.blind_share * len(in_use)
    return max(ctx.settings.blind_min_nodes, share)


def _suspect_ourselves(ctx: Context) -> None:
    """Many nodes silent at once: more likely our own eyes than all of theirs."""
    if ctx.reconciling_until_s is not None or ctx.now_s < ctx.trusting_until_s:
        return
    begun = ctx.now_s - ctx.settings.blind_window_s
    quiet = [node for node in _quiet(ctx) if ctx.sight(node).late_since_s >= begun]
    if len(quiet) >= _blind_limit(ctx) and ctx.blind_until_s is None:
        ctx.blind_until_s = ctx.now_s + ctx.settings.blind_s
        # A rack that is truly lost must not be called our blindness a second time.
        ctx.trusting_until_s = ctx.blind_until_s + ctx.settings.blind_s
        ctx.emit(
            Alert(
                summary=f"{len(quiet)} nodes fell silent at once: the controller distrusts its own "
                f"network and replaces nothing for {ctx.settings.blind_s:.0f} s"
            )
        )


def _trust_ourselves_again(ctx: Context) -> None:
    """The cut has healed; whoever is still silent a moment later really has something."""
    if ctx.blind_until_s is not None and len(_quiet(ctx)) < _blind_limit(ctx):
        ctx.blind_until_s = min(ctx.blind_until_s, ctx.now_s + ctx.settings.reconcile_s)
        # It was our own eyes, so they may fail again.
        ctx.trusting_until_s = ctx.blind_until_s


def _peers_saw_it(ctx: Context, node: NodeRecord) -> bool:
    """Whether ranks on other nodes failed while this one is silent."""
    if node.job is None:
        return False
    job = ctx.state.jobs[node.job]
    incident = ctx.incident_of(job)
    if incident is None or job.state is not JobState.SUSPENDING:
        return False
    return any(
        item.kind is EvidenceKind.WORKER_EXIT and item.node not in (None, node.node)
        for item in incident.evidence
    )


def _lose(ctx: Context, node: NodeRecord, why: str) -> None:
    """A node is lost: its job hears of it; a free one leaves at once."""
    sight = ctx.sight(node.node)
    evidence = Evidence(
        kind=EvidenceKind.NODE_LOST,
        node=node.node,
        rank=None,
        detail=why,
        at_s=sight.late_since_s or ctx.now_s,
    )
    job = None if node.job is None else ctx.state.jobs[node.job]
    if sight.gone and not sight.blames_host and not node.quarantine:
        nodes.release(ctx, node, why)
    elif sight.gone:
        # The cluster confirms it, so nothing is taken away that still lives:
        # this is no quarantine and does not count against the breaker.
        nodes.retire(ctx, node, why)
    elif node.state in FREE:
        nodes.quarantine(ctx, node, why)
    elif node.state in (NodeState.DRAINED, NodeState.VALIDATING, NodeState.REPAIRING):
        nodes.retire(ctx, node, f"lost while it was {node.state}: {why}")
    elif job is not None and job.state in _NO_WORKERS:
        _release(ctx, node, why)
    if job is not None:
        jobs.fault(ctx, job, evidence)


def _release(ctx: Context, node: NodeRecord, why: str) -> None:
    """Take a lost node out of a job that has no workers there now."""
    if nodes.quarantine(ctx, node, why):
        return
    # The breaker bounds quarantines; the node is merely not used before it is heard again.
    nodes.close_commands(ctx, node.node, why, keep_stops=True)
    to = NodeState.DRAINED if node.state is NodeState.DRAINING else NodeState.READY
    ctx.move_node(node, to, why, job=None)


def _begin_validation(ctx: Context, node: NodeRecord, reason: str) -> None:
    node = ctx.move_node(node, NodeState.VALIDATING, reason, passes=0)
    nodes.run_suite(ctx, node, "preflight", ctx.settings.fleet_check_timeout_s)


def _validated(ctx: Context, node: NodeRecord, *, passed: bool, detail: str) -> None:
    if node.is_stuck:
        passed, detail = False, "workers could not be killed"
    if not passed:
        ctx.move_node(node, NodeState.REPAIRING, f"failed its checks, a person must act: {detail}")
        ctx.emit(Alert(summary=f"node {node.node} failed its checks: {detail}"))
    elif node.passes + 1 < PASSES_TO_RETURN:
        node = ctx.put_node(node, passes=node.passes + 1)
        nodes.run_suite(ctx, node, "preflight", ctx.settings.fleet_check_timeout_s)
    else:
        ctx.move_node(node, NodeState.READY, "passed its checks", passes=0, quarantine="")


def _let_time_pass(ctx: Context) -> None:
    for node in list(ctx.state.nodes.values()):
        due = node.timer_s is not None and node.timer_s <= ctx.now_s
        sight = ctx.sight(node.node)
        here = sight.connected and not sight.late
        if node.state is NodeState.QUARANTINED:
            stopping = ctx.commands_of(StopWorkers, node=node.node)
            if here and not stopping and not node.is_stuck:
                ctx.move_node(
                    node,
                    NodeState.DRAINED,
                    node.reason,
                    timer_s=ctx.now_s + ctx.settings.cooldown_s,
                )
            elif due and (sight.silent or node.is_stuck):
                nodes.retire(ctx, node, f"never came back after: {node.reason}")
        elif node.state is NodeState.DRAINED and due and not node.cordoned:
            if here and not node.is_stuck:
                _begin_validation(ctx, node, "its quarantine has cooled down")
            elif sight.silent or node.is_stuck:
                nodes.retire(ctx, node, f"never came back after: {node.reason}")
        elif node.state in FREE and sight.silent:
            # Lost while a job that has ended since held it, or while the breaker was open.
            judge(ctx, node.node)
        elif node.state in FREE and node.is_stuck:
            nodes.quarantine(ctx, node, "its workers could not be killed")
        elif node.state is NodeState.SUSPECT and due:
            ctx.move_node(node, NodeState.ASSIGNED, "no fault since it was suspected")


def _keep_standbys(ctx: Context) -> None:
    """Hold as many checked spares as the most cautious job wants."""
    live = [
        job
        for job in ctx.state.jobs.values()
        if job.state not in (*TERMINAL, JobState.PAUSED) and job.wanted is Wanted.RUN
    ]
    wanted = max((job.plan.standby for job in live), default=0)
    # What a person or the cluster holds back is nobody's spare.
    open_nodes = [
        node
        for node in ctx.state.nodes.values()
        if not node.cordoned and not ctx.sight(node.node).closed
    ]
    standbys = [node for node in open_nodes if node.state is NodeState.STANDBY]
    for node in standbys[wanted:]:
        ctx.move_node(node, NodeState.READY, "no job wants a standby")
    missing = wanted - len(standbys)
    if any(job.state in (JobState.QUEUED, JobState.PROVISIONING) for job in live):
        return
    for node in open_nodes:
        if missing <= 0:
            return
        usable = node.state is NodeState.READY and ctx.connected(node.node)
        if not usable or any(node.workers < job.plan.workers_per_node for job in live):
            continue
        missing -= 1
        recheck = ctx.now_s - ctx.settings.standby_recheck_s
        if node.checked_s is not None and node.checked_s > recheck:
            ctx.move_node(node, NodeState.STANDBY, "checked; held ready")
        elif not ctx.commands_of(RunSuite, node=node.node):
            nodes.run_suite(ctx, node, "preflight", ctx.settings.fleet_check_timeout_s)
