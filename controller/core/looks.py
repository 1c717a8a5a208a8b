"""When a job that waits for nodes has to look at all of them again.

A look at ten thousand nodes for each that joins would cost a fleet's start a hundred million
looks. One change of one node brings a job one node nearer at most: a job that lacks 300 has no
reason to look before 300 nodes have changed. Until then its reason tells of the last look, which
is a second old at most.
"""

from __future__ import annotations

from controller.core.context import Context, Look
from controller.core.records import NO_ATTEMPT, JobRecord
from outlast.ids import JobId

# A look at so many costs less than what else an event does.
FEW_NODES = 512
# What people read of a job that waits is no older.
LOOK_S = 1.0


def may_wait(ctx: Context, job: JobRecord) -> bool:
    """Whether the job lacks nodes still, whatever has happened since it looked."""
    look = ctx.looks.get(job.job_id)
    if look is None or len(ctx.state.nodes) <= FEW_NODES:
        return False
    if job.plan.sizes and job.attempt != NO_ATTEMPT:
        # It may go on with fewer, at times of its own.
        return False
    is_new = ctx.now_s < look.until_s and look.key == _key(ctx, job)
    return is_new and len(look.changed) < look.num_missing


def looked(ctx: Context, job_id: JobId, num_missing: int) -> None:
    """The job has looked at all nodes and lacks so many, which can become right one by one."""
    until_s = ctx.now_s + LOOK_S
    key = _key(ctx, ctx.state.jobs[job_id])
    ctx.looks[job_id] = Look(num_missing=num_missing, until_s=until_s, key=key)


def next_look_s(ctx: Context) -> list[float]:
    """When jobs look again, those for which something has changed."""
    if len(ctx.state.nodes) <= FEW_NODES:
        return []
    return [look.until_s for look in ctx.looks.values() if look.changed]


def _key(ctx: Context, job: JobRecord) -> tuple[object, ...]:
    """What the answer depends on besides nodes."""
    job_facts = (job.state, job.plan, job.misfits, job.deadline_s, job.attempt, job.nodes)
    # What other jobs do decides which nodes are kept from it.
    return (*job_facts, ctx.awaited, ctx.is_unsure, ctx.num_moves)
