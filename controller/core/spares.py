"""Warm spares: free nodes that were checked ahead of time, counted separately for each image."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core import nodes
from controller.core.context import Context
from controller.core.orders import RunSuite
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import JobState, NodeState


def spares_wanted(jobs: Iterable[JobRecord]) -> dict[str, int]:
    """How many warm spares to keep, by image: the largest `resources.standby` of its jobs."""
    wanted: dict[str, int] = {}
    for job in jobs:
        if job.wants_nodes:
            image = job.plan.need.image
            wanted[image] = max(wanted.get(image, 0), job.plan.standby)
    return wanted


def keep(ctx: Context) -> None:
    """Check free nodes ahead of time, so that one can take a lost node's place at once."""
    live = [job for job in ctx.state.live_jobs() if job.wants_nodes]
    missing = spares_wanted(live)
    index = ctx.state.index
    standbys = [
        node for node in map(ctx.state.nodes.__getitem__, index.standby) if _is_open(ctx, node)
    ]
    for node in standbys:
        missing[node.image] = missing.get(node.image, 0) - 1
        if missing[node.image] < 0:
            ctx.move_node(node, NodeState.READY, "no job wants a standby")
    if any(job.state in (JobState.QUEUED, JobState.PROVISIONING) for job in live):
        return
    for node_id in index.free:
        if max(missing.values(), default=0) <= 0:
            return
        node = ctx.state.nodes[node_id]
        if missing.get(node.image, 0) <= 0:
            continue
        usable = node.state is NodeState.READY and ctx.connected(node.node) and _is_open(ctx, node)
        same = (job.plan for job in live if job.plan.need.image == node.image)
        if not usable or any(node.workers < plan.workers_per_node for plan in same):
            continue
        missing[node.image] -= 1
        recheck = ctx.now_s - ctx.settings.standby_recheck_s
        if node.checked_s is not None and node.checked_s > recheck:
            ctx.move_node(node, NodeState.STANDBY, "checked; a warm spare")
        elif not ctx.commands_of(RunSuite, node=node.node):
            nodes.run_suite(ctx, node, "preflight", ctx.settings.fleet_check_timeout_s)


def _is_open(ctx: Context, node: NodeRecord) -> bool:
    """Whether neither a person nor the cluster holds it back: else it is nobody's spare."""
    return not node.cordoned and not ctx.view(node.node).closed
