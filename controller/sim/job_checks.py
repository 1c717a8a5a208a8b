"""What a job may become, seen when it is decided and when all is over."""

from __future__ import annotations

from collections.abc import Iterator

from controller.core import events as ev
from controller.core.changes import State
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.core.verdict import STEADY_S
from controller.sim.attempt import SimJob


def wrong_in_change(
    event: ev.Event, job: JobRecord, before: State, known: SimJob
) -> Iterator[tuple[int, str]]:
    """The invariant and what is wrong, wherever a job must not become what it does."""
    if job.committed_step is not None and job.committed_step not in known.commits:
        yield 7, f"{job.job_id} believes in checkpoint {job.committed_step}"
    old = before.jobs.get(job.job_id)
    if old is None:
        return
    if job.retry_left > old.retry_left and not _may_try_more(event, job, old, before, known):
        yield 6, f"{job.job_id}: retries {old.retry_left} -> {job.retry_left}"
    is_smaller = job.plan.nodes < old.plan.nodes
    if is_smaller and old.state not in (JobState.QUEUED, JobState.PROVISIONING):
        yield 10, f"{job.job_id} shrinks while it is {old.state}"
    if job.skipped[: len(old.skipped)] != old.skipped:
        yield 7, f"{job.job_id} leaves out {job.skipped} after {old.skipped}"
    if job.attempt < old.attempt or job.attempt > old.attempt + 1:
        yield 1, f"{job.job_id}: attempt {old.attempt} -> {job.attempt}"


def _may_try_more(
    event: ev.Event, job: JobRecord, old: JobRecord, before: State, known: SimJob
) -> bool:
    """It has come further than ever, a person wants it to, or its script ran for long."""
    if (job.committed_step or 0) > (old.committed_step or 0):
        return True
    incident = before.incidents.get(old.incident) if old.incident is not None else None
    ran_long = incident is not None and incident.fault_s - known.began_s >= STEADY_S
    is_asked = isinstance(event, ev.JobResumeRequested) and event.job_id == job.job_id
    return is_asked or (job.plan.is_script and ran_long)


def wrong_at_end(job: JobRecord, known: SimJob) -> Iterator[tuple[int, str]]:
    """The same of a job that is over."""
    if job.state is JobState.SUCCEEDED and known.high_step != known.last_step:
        yield 10, f"{job.job_id} SUCCEEDED after step {job.high_step}"
