"""Swaps: a node that a fault speaks against leaves its job for a checked standby at once.

It is checked while the job goes on, not before: else all nodes would wait for the checks of one.
Only for nodes whose ranks' state another node has, too: no step is paid for the time that is won.
"""

from __future__ import annotations

from controller.core import blame, causes, nodes
from controller.core.context import Context
from controller.core.copies import partner_indexes, unfilled
from controller.core.frozen import replace
from controller.core.incident_record import IncidentRecord
from controller.core.kinds import Action, Cause, EvidenceKind, Rung
from controller.core.naming import names
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import IncidentState, NodeState
from controller.core.verdict import PolicyInput, PolicyVerdict
from outlast.ids import NodeId

# So often a node may pass the checks that follow, and be a suspect again; then the job waits for
# them, and for those of all others.
_MAX_SWAPS = 2
# Faults of one node; others may be a program's.
_OF_ONE_NODE = (Cause.DEVICE, Cause.HANG)


def instead_of_checks(
    facts: PolicyInput, verdict: PolicyVerdict, because: str
) -> PolicyVerdict | None:
    """The swap, where a fault whose nodes would be checked allows it; `because` says why they
    would be."""
    culprits = verdict.culprits
    has_state = dict(facts.state_elsewhere)
    if (
        not culprits
        or not _is_of_nodes(facts, verdict)
        or not {Rung.DIAGNOSE, Rung.REPLACE}.issubset(facts.ladder)
        or len(culprits) > facts.ready_standbys
        or not all(set(has_state.get(node, ())).difference(culprits) for node in culprits)
    ):
        return None
    who = "a checked standby takes" if len(culprits) == 1 else "checked standbys take"
    return replace(
        verdict,
        action=Action.SWAP_NODES,
        reason=f"{because}, so {who} the place of {names(culprits)}, checked meanwhile",
    )


def _is_of_nodes(facts: PolicyInput, verdict: PolicyVerdict) -> bool:
    """Whether it speaks against these nodes, and no others."""
    detected = {item.node for item in facts.evidence if item.kind is EvidenceKind.DETECTED}
    if detected:
        return detected == set(verdict.culprits)
    failure = blame.initiating(facts)
    if failure is not None and failure.fault_class in causes.OF_HARDWARE:
        # A connection has two ends: the second time the fault is this one's.
        is_again = set(verdict.culprits) <= set(facts.suspects)
        return verdict.cause in _OF_ONE_NODE or (is_again and not failure.is_cascade)
    # What comes again at once may be the program's, and follows it to any node.
    is_same = verdict.fingerprint != "" and verdict.fingerprint == facts.last_fingerprint
    return verdict.cause in _OF_ONE_NODE and (facts.has_progress or not is_same)


def state_elsewhere(
    ctx: Context, job: JobRecord, incident: IncidentRecord
) -> tuple[tuple[NodeId, tuple[NodeId, ...]], ...]:
    """Of the nodes in evidence that could leave the job now: who else has their ranks' state."""
    attempt = ctx.state.attempts.get(job.job_id)
    if attempt is None:
        return ()
    without = unfilled(job, attempt, incident.fault_step)
    found = []
    for node_id in dict.fromkeys(item.node for item in incident.evidence):
        node = nodes.placed(ctx, job, node_id)
        if node is None or not ctx.state.index.is_placed(attempt, node.node):
            continue
        if not _may_leave(ctx, node):
            continue
        index = ctx.state.index.node_index(attempt, node.node)
        others = partner_indexes(job.plan, attempt.replica_shift, index)
        kept_on = (attempt.nodes[other] for other in others if attempt.nodes[other] not in without)
        found.append((node.node, tuple(each for each in kept_on if _is_there(ctx, job, each))))
    return tuple(found)


def take_out(ctx: Context, node: NodeRecord, incident: IncidentRecord) -> None:
    """Have a node checked, away from its job."""
    begun_s = ctx.now_s - ctx.settings.retire_window_s
    before = (at_s for at_s in node.taken_out_s if at_s > begun_s)
    nodes.close_commands(ctx, node.node, "it has left its job to be checked", keep_stops=True)
    node = ctx.move_node(
        replace(
            node,
            job=None,
            passes=0,
            taken_out_s=(*before, ctx.now_s),
            taken_out_for=incident.incident,
        ),
        NodeState.VALIDATING,
        f"{incident.incident}: {incident.reason}",
    )
    nodes.run_suite(ctx, node, "on-failure", ctx.settings.fleet_check_timeout_s)


def tell(ctx: Context, node: NodeRecord, verdict: str, detail: str = "") -> None:
    """Note in its incident, if that is open still, what came of the checks of a node that was
    taken out."""
    incident = node.taken_out_for and ctx.state.incidents.get(node.taken_out_for)
    if incident and incident.state is not IncidentState.CLOSED:
        # No finding: another fault would be judged by it, and the node is not of this job any more.
        ctx.note(incident, "diagnostics", f"{node.node}: {verdict}{': ' if detail else ''}{detail}")


def _is_there(ctx: Context, job: JobRecord, node_id: NodeId) -> bool:
    node = nodes.placed(ctx, job, node_id)
    is_heard = ctx.connected(node_id) and not ctx.view(node_id).late
    return node is not None and is_heard and not node.is_stuck


def _may_leave(ctx: Context, node: NodeRecord) -> bool:
    begun_s = ctx.now_s - ctx.settings.retire_window_s
    num_swaps = sum(at_s > begun_s for at_s in node.taken_out_s)
    is_well = ctx.connected(node.node) and not node.is_stuck and not node.has_left
    return is_well and node.state is not NodeState.DRAINING and num_swaps < _MAX_SWAPS
