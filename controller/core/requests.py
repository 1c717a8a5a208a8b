"""What persons ask of jobs: submit, cancel, pause, resume. `steps` then moves the job."""

from __future__ import annotations

from controller.core import accounting, attempts, last_checkpoint
from controller.core.changes import JobPut, State
from controller.core.context import Context
from controller.core.events import (
    JobCancelRequested,
    JobPauseRequested,
    JobResumeRequested,
    JobSubmitted,
)
from controller.core.frozen import replace
from controller.core.kinds import Wanted
from controller.core.records import JobRecord
from controller.core.states import AT_WORK, TERMINAL, JobState
from outlast.chosen import ChosenStart


def named(state: State, name: str) -> JobRecord | None:
    """The job of this name that has not ended: people call jobs by their names."""
    return next((job for job in state.live_jobs() if job.name == name), None)


def submitted(ctx: Context, event: JobSubmitted) -> None:
    """Queue a job; the same request again, or the name of one that has not ended, does nothing."""
    for job in ctx.state.jobs.values():
        is_same = (job.request_id, job.owner) == (event.request_id, event.owner)
        if event.request_id and is_same:
            return
    if named(ctx.state, event.name) is not None:
        return
    job = JobRecord(
        job_id=event.job_id,
        name=event.name,
        request_id=event.request_id,
        spec_json=event.spec_json,
        checkpoint_url=event.checkpoint_url,
        plan=event.plan,
        owner=event.owner,
        submitted_s=ctx.now_s,
        state=JobState.QUEUED,
        since_s=ctx.now_s,
        reason="just submitted",
        nodes=(None,) * event.plan.nodes,
        retry_left=event.plan.retry_budget,
        account=accounting.opened(ctx.now_s),
    )
    ctx.record(JobPut(job=job))


def cancel_requested(ctx: Context, event: JobCancelRequested) -> None:
    job = ctx.state.jobs.get(event.job_id)
    if job is None or job.state in TERMINAL:
        return
    last_checkpoint.close_pushes(ctx, job, "the job is cancelled")
    job = ctx.put(replace(job, wanted=Wanted.CANCEL, needs_person=False))
    if job.state in AT_WORK:
        # Nobody needs the state of a trainer that is cancelled; a script may have to clean up.
        attempts.suspend(ctx, job, "cancelled by the user", graceful=job.plan.is_script)
    elif job.state is not JobState.SUSPENDING:
        attempts.finish(ctx, job, JobState.CANCELLED, "cancelled by the user")


def pause_requested(ctx: Context, event: JobPauseRequested) -> None:
    job = ctx.state.jobs.get(event.job_id)
    if job is None or job.state in TERMINAL or job.wanted is Wanted.CANCEL:
        return
    job = ctx.put(replace(job, wanted=Wanted.PAUSE))
    if job.state in AT_WORK:
        attempts.suspend(ctx, job, "paused by the user", graceful=True)
    elif job.state not in (JobState.SUSPENDING, JobState.PAUSED):
        attempts.pause(ctx, job, "paused by the user")


def resume_requested(ctx: Context, event: JobResumeRequested) -> None:
    job = ctx.state.jobs.get(event.job_id)
    if job is None or job.wanted is not Wanted.PAUSE:
        return
    chosen = event.chosen
    if chosen is not None and (job.state is not JobState.PAUSED or chosen.attempt != job.attempt):
        # It has changed since the choice was made.
        return
    last_checkpoint.close_pushes(ctx, job, "the job is resumed")
    # A person has looked at it, so it gets a whole budget again.
    job = ctx.put(
        replace(
            job,
            wanted=Wanted.RUN,
            needs_person=False,
            retry_left=job.plan.retry_budget,
            faults_in_row=0,
            misfits=(),
        )
    )
    if chosen is not None:
        job = _begin_at(ctx, job, chosen)
    if job.state is JobState.PAUSED:
        how = "" if chosen is None else f" {chosen}"
        ctx.move_job(job, JobState.QUEUED, f"resumed by the user{how}")


def _begin_at(ctx: Context, job: JobRecord, chosen: ChosenStart) -> JobRecord:
    """Forget how far the job had come; what had failed there may fail anew.

    `high_step` stays: what is trained again was trained before, and costs time for nothing new.
    """
    return ctx.put(
        replace(
            job,
            # Of a choice from which nothing was trained nothing has come.
            chosen=(*job.chosen[: job.num_begun], chosen),
            committed_step=chosen.step or None,
            replayed_step=None,
            replayed_on=(),
            last_fingerprint="",
            last_fault_step=-1,
            same_failures=0,
        )
    )
