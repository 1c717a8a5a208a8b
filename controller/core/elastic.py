"""Elastic jobs: on fewer nodes while some are missing, and on all of them again.

A job shrinks while it waits for nodes, when that has taken too long. It grows when a checkpoint
is committed and the nodes for a larger size are free: its workers stop after a step, that step
goes into storage, and the next attempt begins there. Neither spends a retry. The state of
another layout lies in storage only, but for what a rank holds alike at both sizes.

Sizes are those of `recovery.elastic`, or of `workload.min_nodes` for a script. One that saves by
itself has no moment that is known to be safe: it is asked to stop once it has run for long enough,
and goes on from what it had saved, as under torchrun.
"""

from __future__ import annotations

from controller.core import attempts, nodes, queue
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.frozen import replace
from controller.core.kinds import Wanted
from controller.core.records import NO_ATTEMPT, JobRecord, NodeRecord, Size
from controller.core.states import JobState, NodeState
from outlast.ids import JobId, NodeId


def shrink(ctx: Context, job: JobRecord) -> JobRecord:
    """The job, some of whose places are free, at the largest size that its nodes fill.

    As it is, while nodes are still to be waited for or too few are there.
    """
    held = [node for place in job.nodes if (node := nodes.placed(ctx, job, place)) is not None]
    size = _smaller(ctx, job, len(held))
    if size is None:
        return ctx.state.jobs[job.job_id]
    # Those that need no check, and did nothing wrong, stay; in the order of their places.
    held.sort(key=lambda node: (node.state is NodeState.SUSPECT, node.node in job.unchecked))
    kept = {node.node for node in held[: size.nodes]}
    for node in held[size.nodes :]:
        _release(ctx, job, node)
    places = tuple(node for node in job.nodes if node in kept)
    return _shrunk(ctx, job, size, places)


def shrink_in_queue(ctx: Context, job: JobRecord, num_free: int) -> JobRecord:
    """The same for a job that has trained before and holds no nodes now."""
    size = None if job.attempt == NO_ATTEMPT else _smaller(ctx, job, num_free)
    if size is None:
        return ctx.state.jobs[job.job_id]
    return _shrunk(ctx, job, size, job.nodes[: size.nodes])


def at_boundary(ctx: Context, job_id: JobId) -> None:
    """A checkpoint was committed: a smaller job stops here if it can grow."""
    job = ctx.state.jobs.get(job_id)
    if job is None or job.state is not JobState.RUNNING or job.wanted is not Wanted.RUN:
        return
    if ctx.now_s >= job.since_s + job.plan.grow_after_s:
        _stop_to_grow(ctx, job)


def in_time(ctx: Context, job: JobRecord) -> bool:
    """A smaller job that runs: whether it stops here to grow, having no checkpoints to wait for.

    Asked after every event.
    """
    plan = job.plan
    is_smaller = bool(plan.sizes) and plan.nodes < plan.sizes[0].nodes
    saves_itself = plan.is_script and job.committed_step is None
    if not is_smaller or not saves_itself or job.wanted is not Wanted.RUN:
        return False
    due_s = job.since_s + plan.grow_after_s
    if ctx.now_s < due_s:
        if job.deadline_s != due_s:
            ctx.put(replace(job, deadline_s=due_s))
        return False
    return bool(ctx.state.index.free) and _stop_to_grow(ctx, job)


def _stop_to_grow(ctx: Context, job: JobRecord) -> bool:
    """Stop the workers if nothing is in the way and a larger size is to be had."""
    is_settled = job.incident is None and job.job_id not in ctx.state.done
    size = _larger(ctx, job) if is_settled and not ctx.is_unsure else None
    if size is None:
        return False
    job = ctx.put(replace(job, grow_step=-1))
    reason = f"to go on with {_in_words(job, size)}"
    attempts.suspend(ctx, job, reason, graceful=True, keep=job.plan.heals)
    return True


def grow(ctx: Context, job: JobRecord) -> bool:
    """The workers have stopped in order to grow: go on once their last step is in storage.

    Says whether the job has moved. The patience with the stop bounds the wait, too.
    """
    committed = -1 if job.committed_step is None else job.committed_step
    assert job.grow_step is not None, f"job {job.job_id} does not grow"
    if job.deadline_s is not None and committed < job.grow_step:
        return False
    size = _larger(ctx, job)
    if size is None:
        ctx.move_job(job, JobState.RESTARTING, "the nodes to grow are not free any more")
        return True
    free = (None,) * (size.nodes - len(job.nodes))
    job = _at(ctx, job, size, (*job.nodes, *free))
    ctx.move_job(job, JobState.RESTARTING, f"going on with {_in_words(job, size)}")
    return True


def in_words(job: JobRecord) -> str:
    """What is to be said of a job that is smaller than wanted; "" of any other."""
    present = next((size for size in job.plan.sizes if size.nodes == job.plan.nodes), None)
    if present is None or present is job.plan.sizes[0]:
        return ""
    return (
        f", with {_in_words(job, present)} instead of {_in_words(job, job.plan.sizes[0])} "
        f"({_setting(job)}) until nodes are free{' at a checkpoint' * (not job.plan.is_script)}"
    )


def _smaller(ctx: Context, job: JobRecord, num_nodes: int) -> Size | None:
    """The largest smaller size that so many nodes fill, once it is time for it."""
    sizes = [size for size in job.plan.sizes if size.nodes < job.plan.nodes]
    due_s = job.since_s + job.plan.shrink_after_s
    # Nodes that it stopped for and that are gone again are not waited for.
    if sizes and ctx.now_s < due_s and job.grow_step is None:
        ctx.put(replace(job, deadline_s=due_s))
        return None
    if ctx.is_unsure:
        return None
    return next((size for size in sizes if size.nodes <= num_nodes), None)


def _larger(ctx: Context, job: JobRecord) -> Size | None:
    """The largest size that the job's nodes and free ones fill; None when it has that."""
    sizes = [size for size in job.plan.sizes if size.nodes > job.plan.nodes]
    if not sizes:
        return None
    _, kept = queue.kept_for_others(ctx, job)
    free = [node for node in nodes.free_nodes(ctx, job) if node.node not in kept]
    most = len(job.nodes) + min(len(free), queue.turns(ctx).left_of_quota(job))
    return next((size for size in sizes if size.nodes <= most), None)


def _shrunk(
    ctx: Context, job: JobRecord, size: Size, places: tuple[NodeId | None, ...]
) -> JobRecord:
    message = f"going on with {_in_words(job, size)}: no more nodes came in time ({_setting(job)})"
    incident = ctx.incident_of(job)
    if incident is not None:
        ctx.note(incident, "elastic", message)
    ctx.emit(Alert(summary=f"job {job.job_id} is {message}"))
    return _at(ctx, job, size, places)


def _at(ctx: Context, job: JobRecord, size: Size, places: tuple[NodeId | None, ...]) -> JobRecord:
    """The job at another size, with these places."""
    plan = replace(
        job.plan,
        nodes=size.nodes,
        replica_node_indexes=size.replica_node_indexes,
        replica_shift=size.replica_shift,
        any_shift_bytes=size.any_shift_bytes,
        need=size.need,
    )
    unchecked = tuple(node for node in job.unchecked if node in places)
    return ctx.put(
        replace(job, plan=plan, spec_json=size.spec_json, nodes=places, unchecked=unchecked)
    )


def _release(ctx: Context, job: JobRecord, node: NodeRecord) -> None:
    ctx.move_node(replace(node, job=None), NodeState.READY, f"{job.job_id} goes on without it")


def _in_words(job: JobRecord, size: Size) -> str:
    return (
        f"{size.nodes} node(s)" if job.plan.is_script else f"dp={size.dp} on {size.nodes} node(s)"
    )


def _setting(job: JobRecord) -> str:
    return "workload.min_nodes" if job.plan.is_script else "recovery.elastic"
