"""Jobs as clients see them, computed once for all who look.

A watched job of 100,000 ranks must not cost the controller's loop more than a watched small
one: whatever grows with the ranks is done at most once a second, and for so many of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from controller.core.edge.edge import Edge
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.rpc.use import step_use
from controller.rpc.views import brief_job, complete
from controller.service import Service
from controller.store.curves import StepRow
from outlast.ids import JobId, NodeId
from outlast.v1 import jobs_pb2

# While a job is in one state, its view is at most this old, and not computed more often.
VIEW_S = 1.0
# Views kept; of jobs that nobody has looked at for longest they are dropped.
MAX_VIEWS = 256
# Ranks whose steps are put together at once, some 5 ms of work; 100,000 ranks have all been looked
# at after 98 views.
USE_RANKS = 1_024

_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job in one moment, for any number of clients. Not to be changed."""

    job: JobRecord
    last: StepRow | None
    is_blind: bool
    at_s: float
    brief: jobs_pb2.Job

    def whole(self) -> jobs_pb2.Job:
        """A message of one's own with spec and nodes."""
        message = jobs_pb2.Job()
        message.CopyFrom(self.brief)
        complete(message, self.job)
        return message

    def has_same_bulk(self, other: JobView) -> bool:
        """Whether what `brief` lacks is the same in both."""
        mine, others = self.job, other.job
        return (mine.nodes is others.nodes or mine.nodes == others.nodes) and (
            mine.submitted_spec_json == others.submitted_spec_json
        )


@dataclass(slots=True)
class _Use:
    """What the ranks of an attempt were found to use."""

    attempt: int
    at_s: float
    use: jobs_pb2.StepUse | None
    # Which of the ranks are looked at next.
    turn: int


class JobViews:
    """The views of the jobs that somebody looks at."""

    def __init__(self, service: Service, edge: Edge, matmul_flops: Mapping[NodeId, float]) -> None:
        self._service = service
        self._edge = edge
        self._matmul_flops = matmul_flops
        self._views: dict[JobId, JobView] = {}
        self._uses: dict[JobId, _Use] = {}

    def fresh(self, job: JobRecord, now_s: float) -> JobView:
        """The job as it is, for whoever has just changed it or asks once."""
        known = self._views.get(job.job_id)
        if known is not None and self._is_present(known, job) and now_s - known.at_s < VIEW_S:
            return known
        return self._computed(job, now_s)

    def shared(self, job_id: JobId, now_s: float) -> JobView:
        """The job for those who follow it: new at once when its state is, else once a second."""
        job = self._service.state.jobs[job_id]
        known = self._views.get(job_id)
        if known is None or _moved(known.job, job):
            return self._computed(job, now_s)
        is_old = now_s - known.at_s >= VIEW_S
        is_changing = job.state is JobState.RUNNING or not self._is_present(known, job)
        return self._computed(job, now_s) if is_old and is_changing else known

    def due_s(self, view: JobView) -> float | None:
        """When the view of its job should be looked at again, though nothing happens until
        then; None when it is up to date."""
        job = self._service.state.jobs.get(view.job.job_id)
        return None if job is None or self._is_present(view, job) else view.at_s + VIEW_S

    def _is_present(self, view: JobView, job: JobRecord) -> bool:
        return (
            view.job is job
            and view.last is self._service.curves.last(job.job_id)
            and view.is_blind == self._service.is_blind
        )

    def _computed(self, job: JobRecord, now_s: float) -> JobView:
        service = self._service
        message = brief_job(
            job,
            service.curves,
            self._matmul_flops,
            now_s=service.now_s,
            is_blind=service.is_blind,
        )
        use = self._use(job, now_s)
        if use is not None:
            message.step_use.CopyFrom(use)
        view = JobView(
            job=job,
            last=service.curves.last(job.job_id),
            is_blind=service.is_blind,
            at_s=now_s,
            brief=message,
        )
        _keep(self._views, job.job_id, view)
        return view

    def _use(self, job: JobRecord, now_s: float) -> jobs_pb2.StepUse | None:
        """What a step uses by the ranks looked at last; of a large job, each time by others."""
        if job.state is not JobState.RUNNING:
            self._uses.pop(job.job_id, None)
            return None
        known = self._uses.get(job.job_id)
        if known is not None and known.attempt != job.attempt:
            known = None
        if known is not None and known.use is not None and now_s - known.at_s < VIEW_S:
            return known.use
        stride = -(-job.plan.world_size // USE_RANKS)
        turn = 0 if known is None else known.turn % stride
        use = step_use(self._edge.some_summaries(job, range(turn, job.plan.world_size, stride)))
        before = None if known is None else known.use
        if use is None:
            use = before
        elif before is not None and stride > 1:
            # What only rises, or never changes, is that of all ranks after as many turns.
            for name in ("peak_memory_bytes", "expected_memory_bytes", "expected_bubble"):
                setattr(use, name, max(getattr(use, name), getattr(before, name)))
        kept = _Use(attempt=job.attempt, at_s=now_s, use=use, turn=turn + 1)
        _keep(self._uses, job.job_id, kept)
        return use


def _moved(before: JobRecord, now: JobRecord) -> bool:
    """Whether something happened to the job that a person who watches waits for."""
    return (before.state, before.attempt, before.wanted, before.incident) != (
        now.state,
        now.attempt,
        now.wanted,
        now.incident,
    )


def _keep(table: dict[JobId, _Kept], job_id: JobId, kept: _Kept) -> None:
    table.pop(job_id, None)
    table[job_id] = kept
    if len(table) > MAX_VIEWS:
        del table[next(iter(table))]
