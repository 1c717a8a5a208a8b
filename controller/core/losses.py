"""Losing nodes: what speaks against each, and when that is enough.

Losing a node takes two independent signs (silence and the cluster's word) or a
long silence; if many nodes fall silent at once the controller suspects itself
and waits.

What becomes of a node afterwards, until it may be used again, is in `fleet`.
"""

from __future__ import annotations

from controller.core import jobs, leaving, nodes
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind
from controller.core.node_events import (
    NodeBack,
    NodeDisconnected,
    NodeGone,
    NodeHeard,
    NodeLate,
    NodeLost,
    NodeSilent,
)
from controller.core.records import NodeRecord
from controller.core.states import AWAY, FREE, JobState, NodeState
from outlast.ids import NodeId

# In these states a job has places but no workers, and nobody waits for its nodes to stop.
_NO_WORKERS = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.REPAIRING)


def disconnected(ctx: Context, event: NodeDisconnected) -> None:
    view = ctx.view(event.node)
    if view.connected:
        view.connected = False
        view.late_since_s = ctx.now_s
        ctx.saw(event.node)
        suspect_ourselves(ctx)
    judge(ctx, event.node)


def late(ctx: Context, event: NodeLate) -> None:
    view = ctx.view(event.node)
    if not view.late:
        view.late = True
        view.late_since_s = ctx.now_s
        ctx.saw(event.node)
        suspect_ourselves(ctx)
    judge(ctx, event.node)


def lost(ctx: Context, event: NodeLost) -> None:
    view = ctx.view(event.node)
    view.late = view.lost = True
    ctx.saw(event.node)
    judge(ctx, event.node)


def silent(ctx: Context, event: NodeSilent) -> None:
    view = ctx.view(event.node)
    view.late = view.lost = view.silent = True
    ctx.silent[event.node] = None
    ctx.saw(event.node)
    judge(ctx, event.node)


def heard(ctx: Context, event: NodeHeard) -> None:
    view = ctx.view(event.node)
    view.late = view.lost = view.silent = False
    ctx.silent.pop(event.node, None)
    ctx.saw(event.node)
    trust_ourselves_again(ctx)


def gone(ctx: Context, event: NodeGone) -> None:
    if event.node not in ctx.state.nodes:
        return
    view = ctx.view(event.node)
    view.gone = event.detail or "the cluster reports it gone"
    view.blames_host = event.blames_host
    ctx.saw(event.node)
    judge(ctx, event.node)


def back(ctx: Context, event: NodeBack) -> None:
    ctx.view(event.node).gone = ""
    ctx.saw(event.node)


def judge(ctx: Context, node_id: NodeId) -> None:
    """Decide whether a node is lost, from all that is seen of it."""
    node = ctx.state.nodes.get(node_id)
    view = ctx.view(node_id)
    if node is None or node.state in AWAY:
        return
    # Right after a start nobody is connected: an agent that is not there is no sign yet.
    is_reconciled = ctx.reconciling_until_s is None
    if view.gone and (not view.connected or view.late) and is_reconciled:
        _lose(ctx, node, view.gone)
    elif view.silent and is_reconciled and ctx.blind_until_s is None:
        _lose(ctx, node, "no heartbeat for longer than heartbeat_silent_s")
    elif view.lost and ctx.blind_until_s is None and _peers_saw_it(ctx, node):
        _lose(ctx, node, "no heartbeat, and ranks elsewhere lost their connection to it")


def judge_all(ctx: Context) -> None:
    """Look at every node again, after a time in which nothing was to be judged."""
    for node_id in list(ctx.state.nodes):
        judge(ctx, node_id)


def end_reconciling(ctx: Context) -> None:
    """The agents have had their time to come back after a start."""
    ctx.reconciling_until_s = None
    # Those that fell silent meanwhile may all be hidden by one cut.
    suspect_ourselves(ctx)
    judge_all(ctx)


def _blind_limit(ctx: Context) -> float:
    share = ctx.settings.blind_share * len(ctx.state.index.in_use)
    return max(ctx.settings.blind_min_nodes, share)


def suspect_ourselves(ctx: Context) -> None:
    """Many nodes silent at once: more likely our own eyes than all of theirs."""
    if ctx.reconciling_until_s is not None or ctx.now_s < ctx.trusting_until_s:
        return
    if ctx.blind_until_s is not None:
        return
    limit = _blind_limit(ctx)
    if len(ctx.quiet) < limit:
        return
    begun = ctx.now_s - ctx.settings.blind_window_s
    quiet = [node for node in ctx.quiet if ctx.view(node).late_since_s >= begun]
    if len(quiet) >= limit:
        ctx.blind_until_s = ctx.now_s + ctx.settings.blind_s
        # A rack that is truly lost must not be called our blindness a second time.
        ctx.trusting_until_s = ctx.blind_until_s + ctx.settings.blind_s
        ctx.emit(
            Alert(
                summary=f"{len(quiet)} nodes fell silent at once: the controller distrusts its own "
                f"network and replaces nothing for {ctx.settings.blind_s:.0f} s"
            )
        )


def trust_ourselves_again(ctx: Context) -> None:
    """The cut has healed; whoever is still silent a moment later really has something."""
    if ctx.blind_until_s is not None and len(ctx.quiet) < _blind_limit(ctx):
        ctx.blind_until_s = min(ctx.blind_until_s, ctx.now_s + ctx.settings.reconcile_s)
        # It was our own eyes, so they may fail again.
        ctx.trusting_until_s = ctx.blind_until_s


def _peers_saw_it(ctx: Context, node: NodeRecord) -> bool:
    """Whether ranks on other nodes failed while this one is silent."""
    if node.job is None:
        return False
    job = ctx.state.jobs[node.job]
    incident = ctx.incident_of(job)
    # One that was acted on before tells of an earlier attempt.
    if incident is None or incident.action is not None or job.state is not JobState.SUSPENDING:
        return False
    kinds = {item.kind for item in incident.evidence if item.node not in (None, node.node)}
    # Where an agent was stopped in order, its workers are what the others have lost.
    return EvidenceKind.WORKER_EXIT in kinds and EvidenceKind.NODE_LEFT not in kinds


def _lose(ctx: Context, node: NodeRecord, why: str) -> None:
    """A node is lost: its job hears of it; a free one leaves at once."""
    if leaving.may_be_let_go(node):
        nodes.release(ctx, node, f"{leaving.in_words(node)}, and has not come back")
        return
    view = ctx.view(node.node)
    evidence = Evidence(
        kind=EvidenceKind.NODE_LOST,
        node=node.node,
        rank=None,
        detail=why,
        at_s=view.late_since_s or ctx.now_s,
    )
    job = None if node.job is None else ctx.state.jobs[node.job]
    if view.gone and not view.blames_host and not node.quarantine:
        nodes.release(ctx, node, why)
    elif view.gone:
        # The cluster confirms it, so nothing is taken away that still lives:
        # this is no quarantine and does not count against the breaker.
        nodes.retire(ctx, node, why)
    elif node.state in FREE or (node.state is NodeState.VALIDATING and not node.quarantine):
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
    ctx.move_node(replace(node, job=None), to, why)
