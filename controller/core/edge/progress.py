"""Steps of many nodes turned into the few events that the machine needs.

A job has advanced when *every* node of the attempt has completed a step. The
machine hears of the first such step of an attempt and of the one that passes
the last fault; a job that stops advancing is reported once per silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.core.events import JobAdvanced
from controller.core.records import JobRecord
from controller.core.states import JobState
from outlast.ids import Attempt, JobId, NodeId


@dataclass(slots=True)
class _Track:
    attempt: Attempt
    # The job's places as they were when last looked at, and the nodes in them.
    places: tuple[NodeId | None, ...] = ()
    members: frozenset[NodeId | None] = frozenset()
    completed: dict[NodeId, int] = field(default_factory=dict)
    resumed: dict[NodeId, int] = field(default_factory=dict)
    at_s: float = 0.0
    common_step: int = -1
    # Reports that are still to come before the common step may have moved.
    behind: int = 0
    changed_s: float = 0.0
    told_first: bool = False
    told_caught_up: bool = False
    told_stalled: bool = False


class ProgressTable:
    """Completed steps per job and node; one entry per live job."""

    def __init__(self) -> None:
        self._tracks: dict[JobId, _Track] = {}

    def forget(self, job: JobId) -> None:
        self._tracks.pop(job, None)

    def made(
        self,
        job: JobRecord,
        node: NodeId,
        *,
        attempt: Attempt,
        completed_step: int,
        resumed_step: int,
        at_s: float,
        now_s: float,
    ) -> list[JobAdvanced]:
        """A node of `job` says how far its ranks are; old attempts are dropped."""
        if attempt != job.attempt:
            return []
        track = self._tracks.get(job.job_id)
        if track is None or track.attempt != attempt:
            track = _Track(attempt=attempt, changed_s=now_s)
            self._tracks[job.job_id] = track
        if track.places is not job.nodes:
            track.places, track.members = job.nodes, frozenset(job.nodes)
        if node not in track.members:
            return []
        before = track.completed.get(node, -1)
        track.completed[node] = max(completed_step, before)
        track.resumed[node] = resumed_step
        track.at_s = max(track.at_s, at_s)
        if len(track.completed) < len(job.nodes):
            return []
        # Only the last of those that held the others back can have moved the common step, so
        # a report of one node does not go through thousands of others.
        if track.behind and before <= track.common_step < completed_step:
            track.behind -= 1
        if not track.behind:
            self._move_common(track, now_s)
        return self._advanced(job, track)

    def _move_common(self, track: _Track, now_s: float) -> None:
        common = min(track.completed.values())
        track.behind = sum(step == common for step in track.completed.values())
        if common > track.common_step:
            track.common_step = common
            track.changed_s = now_s
            track.told_stalled = False

    def _advanced(self, job: JobRecord, track: _Track) -> list[JobAdvanced]:
        caught_up = not track.told_caught_up and track.common_step >= job.catch_up_step
        if track.told_first and not caught_up:
            return []
        resumed = max(track.resumed.values())
        if job.plan.is_script and track.common_step < 1 <= job.high_step:
            # It has said something of its steps before, and will again.
            return []
        if not track.told_first and track.common_step <= resumed:
            return []
        track.told_first = True
        track.told_caught_up = track.told_caught_up or caught_up
        return [
            JobAdvanced(
                job_id=job.job_id,
                attempt=track.attempt,
                completed_step=track.common_step,
                resumed_step=resumed,
                at_s=track.at_s,
            )
        ]

    def expect(self, job: JobRecord, now_s: float) -> None:
        """The job runs: its next step is waited for from now on, if not from an earlier moment.

        Nobody may have said a word since the controller started: it may hang all the same.
        """
        track = self._tracks.get(job.job_id)
        if track is None or track.attempt != job.attempt:
            self._tracks[job.job_id] = _Track(attempt=job.attempt, changed_s=now_s)

    def due_s(self, job: JobRecord, limit_s: float) -> float | None:
        """When it stands still for too long without a step; None when that was reported, or no
        step is expected."""
        track = self._tracks.get(job.job_id)
        if track is None or track.attempt != job.attempt or track.told_stalled:
            return None
        # A script need not say a word of its steps; its agents look at whether it is alive.
        if job.plan.is_script and track.common_step < 1:
            return None
        return track.changed_s + limit_s

    def is_stalled(self, job: JobRecord) -> bool:
        """Whether it was told to stand still, and has completed no step since."""
        track = self._tracks.get(job.job_id)
        is_its = track is not None and track.attempt == job.attempt
        return track is not None and is_its and track.told_stalled and job.state is JobState.RUNNING

    def stalled(self, job: JobRecord, now_s: float, limit_s: float) -> float | None:
        """Seconds without a common step when that is over the limit, reported once."""
        if job.state is not JobState.RUNNING:
            return None
        self.expect(job, now_s)
        due_s = self.due_s(job, limit_s)
        if due_s is None or now_s < due_s:
            return None
        track = self._tracks[job.job_id]
        track.told_stalled = True
        return now_s - track.changed_s
