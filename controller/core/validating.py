"""Checks of nodes that may not be used until they have passed them, and what follows."""

from __future__ import annotations

from controller.core import nodes, swapping
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.frozen import replace
from controller.core.records import NodeRecord
from controller.core.states import NodeState

# A node that comes back must pass this many suites in a row.
PASSES_TO_RETURN = 2


def begin(ctx: Context, node: NodeRecord, reason: str) -> None:
    """Check a node that was excluded."""
    node = ctx.move_node(replace(node, passes=0), NodeState.VALIDATING, reason)
    nodes.run_suite(ctx, node, "preflight", ctx.settings.fleet_check_timeout_s)


def ended(ctx: Context, node: NodeRecord, *, passed: bool, detail: str) -> None:
    """A suite has ended: the node is free, has another one before it, or is kept out."""
    if node.is_stuck:
        passed, detail = False, "workers could not be killed"
    if not passed and not node.quarantine:
        # It had left a job to be checked.
        swapping.tell(ctx, node, "fail", detail)
        ctx.emit(Alert(summary=f"node {node.node} failed its checks: {detail}"))
        reason = f"failed its checks: {detail}; {node.reason}"
        quarantine_in_time(ctx, ctx.put(replace(node, passes=0, reason=reason)))
    elif not passed:
        ctx.move_node(node, NodeState.REPAIRING, f"failed its checks, a person must act: {detail}")
        ctx.emit(Alert(summary=f"node {node.node} failed its checks: {detail}"))
    elif node.passes + 1 < PASSES_TO_RETURN:
        node = ctx.put(replace(node, passes=node.passes + 1))
        nodes.run_suite(ctx, node, "preflight", ctx.settings.fleet_check_timeout_s)
    else:
        if not node.quarantine:
            swapping.tell(ctx, node, "pass")
        ctx.move_node(
            replace(node, passes=0, quarantine="", quarantined_s=None),
            NodeState.READY,
            "passed its checks",
        )


def quarantine_in_time(ctx: Context, node: NodeRecord) -> None:
    """Quarantine a node that failed its checks, now or once the breaker allows it; nobody uses it
    until then."""
    if not nodes.quarantine(ctx, node, node.reason):
        ctx.put(replace(node, timer_s=nodes.breaker_opens_s(ctx)))
