"""Swaps: a node that a fault speaks against leaves its job for a checked standby at once.

It is checked while the job goes on, not before: else all nodes would wait for the checks of one.
Only for nodes whose ranks' state another node has, too: no step is paid for the time that is won.
"""

from __future__ import annotations

from controller.core import blame, nodes
from controller.core.context import Context
from controller.core.copies import partner_indexes
from controller.core.frozen import replace
from controller.core.kinds import Action, Cause, Rung
from controller.core.naming import names
from controller.core.records import IncidentRecord, JobRecord, NodeRecord
from controller.core.states import NodeState
from controller.core.verdict import PolicyInput, PolicyVerdict
from outlast.ids import NodeId

# So often a node may pass the checks that follow, and be a suspect again; then the job waits for
# them, and for those of all others.
_MAX_SWAPS = 2
# Faults of one node: others may have been a program's, or that of a link between two.
_OF_ONE_NODE = (Cause.DEVICE, Cause.HANG)


def instead_of_checks(
    facts: PolicyInput, verdict: PolicyVerdict, because: str
) -> PolicyVerdict | None:
    """The swap, where a fault whose nodes would be checked allows it; `because` says why they are.

    A fault that came again at once may be the program's, and follows it to any node.
    """
    culprits = verdict.culprits
    is_same = verdict.fingerprint != "" and verdict.fingerprint == facts.last_fingerprint
    is_of_nodes = (
        verdict.cause in _OF_ONE_NODE or blame.detected(facts.evidence) is not None
    ) and not (is_same and not facts.has_progress)
    has_state = dict(facts.state_elsewhere)
    if (
        not culprits
        or not is_of_nodes
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


def state_elsewhere(
    ctx: Context, job: JobRecord, incident: IncidentRecord
) -> tuple[tuple[NodeId, tuple[NodeId, ...]], ...]:
    """Of the nodes in evidence that could leave the job now: who else has their ranks' state."""
    attempt = ctx.state.attempts.get(job.job_id)
    if attempt is None:
        return ()
    found = []
    for node_id in dict.fromkeys(item.node for item in incident.evidence):
        node = nodes.placed(ctx, job, node_id)
        if node is None or node_id not in attempt.nodes or not _may_leave(ctx, node):
            continue
        index = ctx.state.index.node_index(attempt, node.node)
        others = partner_indexes(job.plan, attempt.replica_shift, index)
        living = (attempt.nodes[other] for other in others)
        kept_on = tuple(each for each in living if nodes.placed(ctx, job, each) is not None)
        found.append((node.node, kept_on))
    return tuple(found)


def take_out(ctx: Context, node: NodeRecord, reason: str) -> None:
    """Have a node checked, away from its job."""
    begun_s = ctx.now_s - ctx.settings.retire_window_s
    before = (at_s for at_s in node.taken_out_s if at_s > begun_s)
    nodes.close_commands(ctx, node.node, "it has left its job to be checked", keep_stops=True)
    node = ctx.move_node(
        replace(node, job=None, passes=0, taken_out_s=(*before, ctx.now_s)),
        NodeState.VALIDATING,
        reason,
    )
    nodes.run_suite(ctx, node, "on-failure", ctx.settings.fleet_check_timeout_s)


def _may_leave(ctx: Context, node: NodeRecord) -> bool:
    begun_s = ctx.now_s - ctx.settings.retire_window_s
    num_swaps = sum(at_s > begun_s for at_s in node.taken_out_s)
    is_well = ctx.connected(node.node) and not node.is_stuck and not node.has_left
    return is_well and node.state is not NodeState.DRAINING and num_swaps < _MAX_SWAPS
