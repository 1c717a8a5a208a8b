"""Warm spares: free nodes that were checked ahead of time, counted separately for each image."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core import nodes
from controller.core.context import Context
from controller.core.orders import RunSuite
from controller.core.records import NO_ATTEMPT, JobRecord, NodeRecord
from controller.core.states import JobState, NodeState


def spares_wanted(jobs: Iterable[JobRecord]) -> dict[str, int]:
    """How many warm spares to keep, by image: the largest `resources.standby` of its jobs."""
    wanted: dict[str, int] = {}
    for job in jobs:
        if job.wants_nodes:
            image = job.plan.need.image
            wanted[image] = max(wanted.get(image, 0), job.plan.standby)
    return wanted


def is_ready(ctx: Context, job: JobRecord, node: NodeRecord) -> bool:
    """Whether a node may take a place of the job as it is: a standby that was checked lately.

    A job's first start has all of its nodes checked.
    """
    return (
        job.attempt > NO_ATTEMPT
        and node.state is NodeState.STANDBY
        # The next check may be under way.
        and _is_checked_lately(ctx, node, more_s=ctx.settings.fleet_check_timeout_s)
        and node.checked_storage == job.checkpoint_url
    )


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
        else:
            _check_again(ctx, node, live)
    if any(job.state in (JobState.QUEUED, JobState.PROVISIONING) for job in live):
        return
    # Asked first, too: each node that joins would have all free ones put in order again.
    for node_id in index.free if _is_any_missing(missing) else ():
        if not _is_any_missing(missing):
            return
        node = ctx.state.nodes[node_id]
        if missing.get(node.image, 0) <= 0:
            continue
        usable = node.state is NodeState.READY and ctx.connected(node.node) and _is_open(ctx, node)
        same = (job.plan for job in live if job.plan.need.image == node.image)
        if not usable or any(node.workers < plan.workers_per_node for plan in same):
            continue
        missing[node.image] -= 1
        if _is_checked_lately(ctx, node):
            ctx.move_node(node, NodeState.STANDBY, "checked; a warm spare")
        else:
            _check(ctx, node, live)


def _is_any_missing(missing: dict[str, int]) -> bool:
    return max(missing.values(), default=0) > 0


def next_checks_s(ctx: Context) -> list[float]:
    """When standbys are to be checked again."""
    standbys = map(ctx.state.nodes.__getitem__, ctx.state.index.standby)
    recheck_s = ctx.settings.standby_recheck_s
    return [node.checked_s + recheck_s for node in standbys if node.checked_s is not None]


def _check_again(ctx: Context, node: NodeRecord, live: list[JobRecord]) -> None:
    """Check a standby whose checks were long ago, or did not try the storage of its jobs."""
    storages = _storages(node, live)
    is_new = bool(storages) and node.checked_storage not in storages
    if ctx.connected(node.node) and (is_new or not _is_checked_lately(ctx, node)):
        _check(ctx, node, live)


def _check(ctx: Context, node: NodeRecord, live: list[JobRecord]) -> None:
    if ctx.commands_of(RunSuite, node=node.node):
        return
    storage = next(iter(_storages(node, live)), "")
    limit_s = ctx.settings.fleet_check_timeout_s
    nodes.run_suite(ctx, node, "preflight", limit_s, storage=storage)


def _storages(node: NodeRecord, live: list[JobRecord]) -> list[str]:
    """Where the jobs that a standby is kept for have their checkpoints."""
    plans = ((job.plan, job.checkpoint_url) for job in live)
    return [url for plan, url in plans if plan.standby > 0 and plan.need.image == node.image]


def _is_checked_lately(ctx: Context, node: NodeRecord, *, more_s: float = 0.0) -> bool:
    recheck_s = ctx.settings.standby_recheck_s + more_s
    return node.checked_s is not None and node.checked_s + recheck_s > ctx.now_s


def _is_open(ctx: Context, node: NodeRecord) -> bool:
    """Whether neither a person nor the cluster holds it back: else it is nobody's spare."""
    return not node.cordoned and not ctx.view(node.node).closed
