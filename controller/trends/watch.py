"""Looks at running jobs for weeks: keeps their hours and nodes' days, and notes what is found.

Every 20 s it asks what ranks said last of their steps, every minute it puts new rows of the curve
together, and every ten minutes it looks at the whole. Nothing is decided by it: what it finds is
noted among the job's incidents, and never acted on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controller.core.edge.edge import Edge
from controller.core.events import Detected, DetectionEnded
from controller.core.kinds import Cause
from controller.core.records import JobRecord
from controller.core.states import TERMINAL, IncidentState, JobState
from controller.service import Service
from controller.specs import settings_of, spec_of
from controller.store.backend import DiskFullError
from controller.store.trends import DAY_S, PAGE_ROWS, TrendStore
from controller.trends.sampling import Window, begin_window, gather, layout_of
from diagnostics.core.history import HOUR_S, MOST_HOURS, History, Hour, findings, history
from diagnostics.core.hours import HourTable, StepFigures
from diagnostics.core.launches import Launches
from diagnostics.core.node_days import NodeDay, of_window
from diagnostics.core.periods import periodic_stalls, step_times
from outlast.ids import JobId, NodeId

SAMPLE_PERIOD_S = 20.0
READ_PERIOD_S = 60.0
LOOK_PERIOD_S = 600.0
# As long as nodes are compared; with fewer samples they are not.
WINDOW_S = 600.0
_LEAST_SAMPLES = 10
# The newest steps, in which periodic stalls are looked for: of 5 s, half a day.
STALL_STEPS = 10_000
# What was found is over when so many looks have not found it.
_CALM_LOOKS = 3
# Written at once, some milliseconds of the loop.
_NODES_AT_ONCE = 256
# Between pages: a job of a million steps must not hold up heartbeats.
_PAUSE_S = 0.005
# How old a report on request may be.
_FRESH_S = 60.0
# Nodes are held against each other over so many days.
NODE_DAYS = 7


@dataclass(slots=True)
class _Seen:
    """What is known of one job."""

    hours: HourTable
    window: Window | None = None
    found: History | None = None
    found_s: float = 0.0
    # Looks since a cause was last found.
    calm: dict[Cause, int] = field(default_factory=dict)


class TrendWatch:
    """Watches every job of a controller."""

    def __init__(self, service: Service, edge: Edge, store: TrendStore) -> None:
        self._service = service
        self._edge = edge
        self._store = store
        self._seen: dict[JobId, _Seen] = {}
        self.newest_node_days: Mapping[NodeId, NodeDay] = {}
        """Of the last `NODE_DAYS` days, as they were at the last look."""

    async def run(self) -> None:
        """Look for as long as the controller lives."""
        read_s = look_s = self._service.now_s
        while True:
            await asyncio.sleep(SAMPLE_PERIOD_S)
            try:
                await self.sample()
                now_s = self._service.now_s
                if now_s - read_s >= READ_PERIOD_S:
                    read_s = now_s
                    await self.read()
                if now_s - look_s >= LOOK_PERIOD_S:
                    look_s = now_s
                    await self.look()
            except Exception as error:  # noqa: BLE001  # a mistake of ours must not be the last look
                self._service.guard.note("watch", error)

    def known(self) -> dict[JobId, History]:
        """What was found last of each job that has not ended."""
        return {job: seen.found for job, seen in self._seen.items() if seen.found is not None}

    def node_days(self, num_days: int = NODE_DAYS) -> dict[NodeId, NodeDay]:
        """What each node was like over the last days, today included."""
        return self._store.days(int(self._service.now_s // DAY_S) - num_days + 1)

    async def sample(self) -> None:
        """Ask what the ranks of every running job said last."""
        for job in self._running():
            seen = self._of(job)
            now_s = self._service.now_s
            window = seen.window
            if window is not None and (
                window.attempt != job.attempt or now_s - window.begun_s >= WINDOW_S
            ):
                await self._end_window(seen)
            if seen.window is None:
                seen.window = await asyncio.to_thread(begin_window, job, now_s)
            window, sample = seen.window, await gather(job, self._edge)
            await asyncio.to_thread(window.launches.add, sample)
            if window.last_s is not None:
                window.service_s += min(now_s - window.last_s, 2 * SAMPLE_PERIOD_S)
            window.last_s = now_s
            window.num_samples += 1

    async def read(self) -> None:
        """Put the new rows of every job's curve together, and keep the hours that are over."""
        if self._service.read_only:
            return
        jobs = self._service.state.jobs
        for job in [job for job in jobs.values() if job.state not in TERMINAL]:
            self._of(job)
        for job_id in list(self._seen):
            try:
                await self._read_job(job_id)
            except DiskFullError:
                # Read again from where the last hour was written.
                del self._seen[job_id]
        for job_id in self._store.jobs():
            if job_id not in jobs:
                self._store.forget_job(job_id)

    async def look(self) -> None:
        """Look at the whole of every running job, and note what is found."""
        for job in self._running():
            self._of(job)
            found = await self.report(job.job_id, fresh_s=0.0)
            self._note(job, found)
        days = self.node_days()
        nodes = self._service.state.nodes
        self.newest_node_days = {node: day for node, day in days.items() if node in nodes}
        for node in days.keys() - nodes.keys():
            self._store.forget_node(node)

    async def report(self, job_id: JobId, *, fresh_s: float = _FRESH_S) -> History:
        """What a job's past shows, at most so old."""
        seen, now_s = self._seen.get(job_id), self._service.now_s
        if seen is not None and seen.found is not None and now_s - seen.found_s < fresh_s:
            return seen.found
        hours = self._store.hours(job_id, now_s - 2 * MOST_HOURS * HOUR_S)
        rows: list[StepFigures] = []
        below = 2**62
        while len(rows) < STALL_STEPS:
            page = self._store.newest_steps(job_id, below, STALL_STEPS - len(rows))
            rows += page
            if len(page) < PAGE_ROWS:
                break
            below = page[-1].version
            await asyncio.sleep(_PAUSE_S)
        found = await asyncio.to_thread(_history, hours, rows)
        if seen is not None:
            seen.found, seen.found_s = found, now_s
        return found

    def _running(self) -> list[JobRecord]:
        jobs = self._service.state.jobs.values()
        return [job for job in jobs if job.state is JobState.RUNNING]

    def _of(self, job: JobRecord) -> _Seen:
        seen = self._seen.get(job.job_id)
        if seen is None:
            hours = HourTable(self._store.read_until(job.job_id))
            seen = self._seen[job.job_id] = _Seen(hours=hours)
        seen.hours.attempt_has(job.attempt, layout_of(job))
        return seen

    async def _read_job(self, job_id: JobId) -> None:
        seen, job = self._seen[job_id], self._service.state.jobs.get(job_id)
        while page := self._store.steps_since(job_id, seen.hours.version):
            seen.hours.take(page)
            await asyncio.sleep(_PAUSE_S)
        is_over = job is None or job.state in TERMINAL
        window = seen.window
        if window is not None and (job is None or is_over or job.attempt != window.attempt):
            await self._end_window(seen)
        hours, until = seen.hours.close(self._service.now_s, is_last=is_over)
        if hours and job is not None:
            self._store.put_hours(job_id, hours, until)
        if is_over:
            del self._seen[job_id]

    async def _end_window(self, seen: _Seen) -> None:
        window, seen.window = seen.window, None
        assert window is not None
        launches, days = await asyncio.to_thread(_of_window, window)
        if launches is not None:
            seen.hours.seen(window.begun_s, window.attempt, launches)
        nodes = list(days)
        for first in range(0, len(nodes), _NODES_AT_ONCE):
            some = {node: days[node] for node in nodes[first : first + _NODES_AT_ONCE]}
            if not self._service.read_only:
                self._store.add_days(some, int(window.begun_s // DAY_S))
            await asyncio.sleep(0)

    def _note(self, job: JobRecord, found: History) -> None:
        """Open a note for what is found, and close it when it is not any more."""
        if settings_of(job).modes.get("trends") == "off":
            return
        messages: dict[Cause, str] = {}
        for each in findings(found, known_periods(job)):
            cause = Cause(each.subject)
            messages[cause] = "; ".join(filter(None, (messages.get(cause), each.message)))
        calm, noted = self._of(job).calm, self._noted(job)
        for cause in (Cause.MFU_DECLINE, Cause.PERIODIC_STALL, Cause.LATE_LAUNCHES):
            calm[cause] = 0 if cause in messages else calm.get(cause, 0) + 1
            if cause in messages and cause not in noted:
                self._service.post(self._detected(job, cause, messages[cause]))
            elif cause in noted and calm[cause] >= _CALM_LOOKS:
                self._service.post(
                    DetectionEnded(job_id=job.job_id, cause=cause, node=None, detail="it is over")
                )

    def _detected(self, job: JobRecord, cause: Cause, message: str) -> Detected:
        return Detected(
            job_id=job.job_id,
            attempt=job.attempt,
            cause=cause,
            node=None,
            rank=None,
            detail=message,
            at_s=self._service.now_s,
            acts=False,
        )

    def _noted(self, job: JobRecord) -> set[Cause]:
        """Causes of open notes of the present attempt, an earlier controller's included."""
        state = self._service.state
        opened = (state.incidents[each] for each in state.index.open_incidents)
        return {
            incident.cause
            for incident in opened
            if (incident.job, incident.attempt) == (job.job_id, job.attempt)
            and incident.state is IncidentState.OPEN
        }


def known_periods(job: JobRecord) -> dict[str, int]:
    """Settings of a job that make something happen every so many steps."""
    spec = spec_of(job.spec_json)
    return {
        "checkpoint.storage_interval_steps": spec.checkpoint.storage_interval_steps,
        "checkpoint.memory_interval_steps": spec.checkpoint.memory_interval_steps,
        "eval.interval_steps": spec.eval.interval_steps or 0,
        # A script's collector runs when Python finds it due.
        "garbage_interval_steps": 0 if spec.is_script else spec.garbage_interval_steps,
    }


def _of_window(window: Window) -> tuple[Launches | None, dict[NodeId, NodeDay]]:
    if window.num_samples < _LEAST_SAMPLES:
        return None, {node: of_window(None, window.service_s) for node in window.nodes}
    works = window.launches.nodes() if len(window.nodes) > 1 else {}
    days = {node: of_window(works.get(node), window.service_s) for node in window.nodes}
    return window.launches.launches(), days


def _history(hours: Iterable[Hour], rows: Iterable[StepFigures]) -> History:
    ordered = sorted(rows, key=lambda row: (row.attempt, row.step))
    times = step_times(
        (row.step, row.attempt, row.at_s, row.duration_s, row.tokens) for row in ordered
    )
    return history(hours, periodic_stalls(times))
