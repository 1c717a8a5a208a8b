"""Whose turn it is: jobs that wait for their first nodes, and who makes room for them.

A job starts when all its nodes are there (gang admission), so that no two hold half of what they
need. Those of a higher priority come first; of equal ones those whose owner has fewer nodes, then
those that came first. Others may go ahead of a job that cannot start yet while it has not waited
for long; after that, free nodes that it can use are kept for it, so that small jobs do not starve
large ones. A job that may preempt has jobs of a lower priority stop after a step, and go on from
its checkpoint when nodes are free for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from controller.core import attempts, misfit, nodes
from controller.core.changes import State
from controller.core.context import Context
from controller.core.frozen import replace
from controller.core.kinds import Wanted
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import AWAY, EXCLUDED, JobState, NodeState
from outlast.ids import JobId, NodeId

# More than any fleet has.
_ANY_NUMBER = 1 << 31


def in_order(ctx: Context) -> Iterator[JobId]:
    """All jobs that have not ended: first those that have nodes, then the others by their turn.

    A job that starts meanwhile changes the shares of owners, and so who is next.
    """
    live = ctx.state.live_jobs()
    yield from [job.job_id for job in live if job.state is not JobState.QUEUED]
    done: set[JobId] = set()
    while left := [job for job in waiting(ctx.state) if job.job_id not in done]:
        for job in left:
            done.add(job.job_id)
            yield job.job_id
            if ctx.state.jobs[job.job_id].state is not JobState.QUEUED:
                break


def waiting(state: State) -> list[JobRecord]:
    """Jobs that have no nodes yet, by whose turn it is."""
    queued = [job for job in state.live_jobs() if job.state is JobState.QUEUED]
    if len(queued) < 2:
        return queued
    held = _held_by_owner(state)
    return sorted(
        queued,
        key=lambda job: (-job.plan.priority, held[job.owner], job.submitted_s, job.job_id),
    )


def over_quota(ctx: Context, job: JobRecord) -> str:
    """Why its owner may not have the nodes that a job wants now; "" when he may."""
    left = left_of_quota(ctx, job)
    if job.plan.nodes <= left:
        return ""
    most = ctx.settings.quota_of(job.owner)
    held = _held_by_owner(ctx.state)[job.owner]
    return (
        f"{job.owner} may have {most} node(s) at a time and has {held}; this job needs "
        f"{job.plan.nodes}"
    )


def left_of_quota(ctx: Context, job: JobRecord) -> int:
    """How many more nodes the owner of a job may have."""
    most = ctx.settings.quota_of(job.owner)
    if most is None:
        return _ANY_NUMBER
    return max(0, most - _held_by_owner(ctx.state)[job.owner])


def kept_for_others(ctx: Context, job: JobRecord) -> tuple[JobRecord | None, frozenset[NodeId]]:
    """The job ahead of this one for which free nodes are kept, and those nodes. Of one that has
    nodes and would have more, all that wait are ahead."""
    for ahead in waiting(ctx.state):
        if ahead.job_id == job.job_id:
            break
        if ahead.held_back or ahead.job_id in ctx.aside:
            continue
        is_long = ctx.now_s - ahead.since_s >= ctx.settings.reserve_after_s
        if (is_long or ahead.plan.priority > job.plan.priority) and _could_ever_start(ctx, ahead):
            return ahead, frozenset(node.node for node in nodes.free_nodes(ctx, ahead))
    return None, frozenset()


def make_room(ctx: Context, job: JobRecord, num_free: int) -> str:
    """Have jobs of a lower priority stop, if that gives this one all its nodes.

    Says which make room; "" when none does.
    """
    if not job.plan.preempts or ctx.is_unsure:
        return ""
    live = ctx.state.live_jobs()
    yielding = [each for each in live if each.yields_to == job.job_id]
    missing = job.plan.nodes - num_free - sum(len(_usable(ctx, job, each)) for each in yielding)
    if missing > 0:
        chosen = _victims(ctx, job, missing)
        for victim in chosen:
            _stop(ctx, victim, job)
        yielding += chosen
    return ", ".join(each.job_id for each in yielding)


def leave(ctx: Context, job: JobRecord) -> bool:
    """The workers of a job that makes room have stopped: it waits for its turn again, once their
    last step is in storage. The patience with the stop bounds that wait, too.
    """
    committed = -1 if job.committed_step is None else job.committed_step
    assert job.grow_step is not None, f"job {job.job_id} makes no room"
    if job.deadline_s is not None and committed < job.grow_step:
        return False
    reason = f"made room for {job.yields_to}; it goes on when it is its turn again"
    job = replace(job, grow_step=None, yields_to=None, unchecked=(), num_yields=job.num_yields + 1)
    job = ctx.move_job(job, JobState.QUEUED, reason)
    attempts.release_nodes(ctx, job)
    return True


def _stop(ctx: Context, victim: JobRecord, job: JobRecord) -> None:
    victim = ctx.put(replace(victim, grow_step=-1, yields_to=job.job_id))
    why = (
        f"its nodes go to {job.job_id}, whose priority is {job.plan.priority}, not "
        f"{victim.plan.priority}"
    )
    attempts.suspend(ctx, victim, why, graceful=True)


def _victims(ctx: Context, job: JobRecord, missing: int) -> list[JobRecord]:
    """Jobs to stop for so many nodes: those of the lowest priority, of these the ones that have
    trained for the shortest time; none when all together would not do."""
    able = [
        each
        for each in ctx.state.live_jobs()
        if each.plan.priority < job.plan.priority
        and each.state is JobState.RUNNING
        and each.wanted is Wanted.RUN
        and each.incident is None
        and each.job_id not in ctx.state.done
        and each.job_id not in ctx.aside
    ]
    able.sort(key=lambda each: (each.plan.priority, -each.since_s, each.job_id))
    chosen: list[JobRecord] = []
    for each in able:
        if missing <= 0:
            break
        gained = len(_usable(ctx, job, each))
        if gained:
            chosen.append(each)
            missing -= gained
    if missing > 0:
        return []
    # What was taken before a large one may not be needed any more.
    for each in reversed(chosen[:-1]):
        gained = len(_usable(ctx, job, each))
        if missing + gained <= 0:
            chosen.remove(each)
            missing += gained
    return chosen


def _usable(ctx: Context, job: JobRecord, other: JobRecord) -> list[NodeRecord]:
    """The nodes of another job that this one could have."""
    held = (nodes.placed(ctx, other, node) for node in other.nodes)
    return [node for node in held if node is not None and _suits(ctx, job, node)]


def _could_ever_start(ctx: Context, job: JobRecord) -> bool:
    """Whether the fleet has enough nodes for a job, whoever has them now."""
    suiting = (node for node in ctx.state.nodes.values() if _suits(ctx, job, node))
    return sum(1 for _ in suiting) >= job.plan.nodes


def _suits(ctx: Context, job: JobRecord, node: NodeRecord) -> bool:
    is_out = node.cordoned or node.state in (*AWAY, *EXCLUDED, NodeState.DRAINING)
    return not is_out and misfit.fits(job, node, ctx.now_s) and ctx.connected(node.node)


def _held_by_owner(state: State) -> Counter[str]:
    held = Counter[str]()
    for job in state.live_jobs():
        held[job.owner] += state.index.num_held.get(job.job_id, 0)
    return held
