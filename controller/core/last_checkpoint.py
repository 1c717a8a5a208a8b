"""A job has succeeded when its last checkpoint is in storage, not when its last step is done.

A job whose ranks have done all steps waits until the last checkpoint is committed; agents try
again meanwhile. If that takes too long it is paused: its state stays in the host memory of its
nodes, from where `outlast ckpt push` uploads it, to the same place or another. Whenever it is
committed, the job has succeeded.
"""

from __future__ import annotations

from controller.core import accounting, attempts, incidents
from controller.core.context import Context
from controller.core.events import CheckpointFailed, CheckpointPushRequested, CommandFinished
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind, Wanted
from controller.core.orders import CommandRecord, PushCheckpoint
from controller.core.records import JobRecord
from controller.core.states import JobState
from outlast.failures import FailureClass
from outlast.ids import CommandId


def all_steps_done(ctx: Context, job: JobRecord) -> None:
    """Every rank has ended well: the job has succeeded, or waits for its last checkpoint."""
    if job.plan.total_steps is not None:
        job = ctx.put(replace(job, high_step=job.plan.total_steps))
    if is_stored(job) or job.plan.last_checkpoint_s <= 0:
        _succeed(ctx, job)
        return
    if job.state is JobState.STARTING:
        attempts.close_starts(ctx, job)
        job = ctx.move_job(job, JobState.RUNNING, "resumed after the last step")
    trouble = incidents.storage_trouble(ctx, job)
    why = "it is being uploaded" if trouble is None else trouble.evidence[-1].detail
    ctx.put(
        replace(
            job,
            reason=_waiting(job, why),
            # No step is trained any more.
            account=accounting.moved(job.account, accounting.Part.CHECKPOINT, ctx.now_s),
            deadline_s=ctx.now_s + job.plan.last_checkpoint_s,
        )
    )


def are_steps_done(ctx: Context, job: JobRecord) -> bool:
    """Whether every rank of the present attempt has done all steps."""
    return len(ctx.state.done.get(job.job_id, {})) == job.plan.world_size


def is_awaited(ctx: Context, job: JobRecord) -> bool:
    """Whether all that the job still waits for is its last checkpoint."""
    return job.state is JobState.RUNNING and are_steps_done(ctx, job)


def is_stored(job: JobRecord) -> bool:
    """Whether the checkpoint of the last step is committed."""
    last = job.plan.total_steps
    return last is not None and job.committed_step is not None and job.committed_step >= last


def succeed_if_stored(ctx: Context, job: JobRecord) -> bool:
    """A job that waited, or that was paused for want of storage, has all that it was to have."""
    if not is_stored(job) or job.wanted is Wanted.CANCEL:
        return False
    _succeed(ctx, ctx.put(replace(job, wanted=Wanted.RUN, needs_person=False)))
    return True


def failed(ctx: Context, event: CheckpointFailed) -> None:
    """An upload failed: whatever waits for it gets the reason."""
    job = ctx.state.jobs.get(event.job_id)
    is_upload = not (event.was_stored or event.was_copied)
    if job is not None and is_upload and is_awaited(ctx, job):
        ctx.put(replace(job, reason=_waiting(job, f"step {event.step}: {event.detail}")))


def not_stored(ctx: Context, job: JobRecord) -> Evidence:
    """The sign that the last checkpoint did not get to storage in time."""
    return Evidence(
        kind=EvidenceKind.CHECKPOINT,
        node=None,
        rank=None,
        detail=f"{_all_done(job)}, but the last checkpoint is not in "
        f"{job.checkpoint_url} after {job.plan.last_checkpoint_s:g} s "
        f"(checkpoint.last_timeout_s): {_why(job)}",
        at_s=ctx.now_s,
        fault_class=FailureClass.LAST_CHECKPOINT,
    )


def push_requested(ctx: Context, event: CheckpointPushRequested) -> None:
    """Upload what the nodes of a paused job hold in host memory."""
    job = ctx.state.jobs.get(event.job_id)
    if job is None or job.state is not JobState.PAUSED:
        return
    held = tuple(dict.fromkeys(node for node in job.nodes if node is not None))
    if is_pushing(ctx, job) or not held or not all(map(ctx.connected, held)):
        return
    number = job.num_pushes + 1
    url = event.checkpoint_url or job.checkpoint_url
    job = ctx.put(
        replace(
            job,
            num_pushes=number,
            reason=f"uploading what its nodes hold in host memory to {url}",
        )
    )
    for node in held:
        ctx.open_command(
            CommandId(f"{job.job_id}/push{number}/{node}"),
            node,
            PushCheckpoint(checkpoint_url=url, timeout_s=event.timeout_s, owner=job.mark),
            job=job.job_id,
            attempt=job.attempt,
        )


def push_finished(
    ctx: Context, job: JobRecord, record: CommandRecord, event: CommandFinished
) -> None:
    """A node has uploaded its part, or could not."""
    if job.state is not JobState.PAUSED:
        return
    assert isinstance(record.command, PushCheckpoint)
    if not event.ok:
        reason = (
            f"the upload from host memory failed on {record.node}: {event.detail}; host memory is "
            f"kept: make room and repeat `outlast ckpt push {job.job_id}`, or give --to URL"
        )
        ctx.put(replace(job, reason=reason))
        return
    # Each node answers when the whole checkpoint is committed.
    ctx.put(
        replace(
            job,
            checkpoint_url=record.command.checkpoint_url,
            reason=f"what its nodes held in host memory is committed in "
            f"{record.command.checkpoint_url}; `outlast resume {job.job_id}` continues",
        )
    )


def is_pushing(ctx: Context, job: JobRecord) -> bool:
    """Whether a node has yet to say what became of an upload that a person asked for."""
    return bool(ctx.commands_of(PushCheckpoint, job=job.job_id))


def close_pushes(ctx: Context, job: JobRecord, why: str) -> None:
    """Wait for no upload any more that a person asked for: the job goes on, or ends."""
    for command in ctx.commands_of(PushCheckpoint, job=job.job_id):
        ctx.close_command(command.command_id, why)


def _succeed(ctx: Context, job: JobRecord) -> None:
    reason = _all_done(job)
    if job.plan.last_checkpoint_s > 0:
        reason += f"; checkpoint {job.committed_step} is committed in {job.checkpoint_url}"
    attempts.finish(ctx, job, JobState.SUCCEEDED, reason)


_MARK = "waiting for the last checkpoint"


def _waiting(job: JobRecord, why: str) -> str:
    return f"{_all_done(job)}; {_MARK}: {why}"


def _all_done(job: JobRecord) -> str:
    if job.plan.is_script:
        return "every rank ended with exit code 0"
    return f"all {job.plan.total_steps} steps are done"


def _why(job: JobRecord) -> str:
    """What an upload failed of last."""
    return job.reason.partition(f"{_MARK}: ")[2] or "no upload has ended"
