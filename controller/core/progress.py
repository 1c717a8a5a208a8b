"""Steps of many nodes turned into the few events that the machine needs.

A job has advanced when *every* node of the attempt has completed a step. The
machine hears of the first such step of an attempt and of the one that passes
the last fault; a job that stops advancing is told once per silence.
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
    completed: dict[NodeId, int] = field(default_factory=dict)
    resumed: dict[NodeId, int] = field(default_factory=dict)
    at_s: float = 0.0
    common_step: int = -1
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
        if attempt != job.attempt or node not in job.nodes:
            return []
        track = self._tracks.get(job.job_id)
        if track is None or track.attempt != attempt:
            track = _Track(attempt=attempt, changed_s=now_s)
            self._tracks[job.job_id] = track
        track.completed[node] = max(completed_step, track.completed.get(node, -1))
        track.resumed[node] = resumed_step
        track.at_s = max(track.at_s, at_s)
        if len(track.completed) < len(job.nodes):
            return []
        common = min(track.completed.values())
        if common > track.common_step:
            track.common_step = common
            track.changed_s = now_s
            track.told_stalled = False
        return self._advanced(job, track)

    def _advanced(self, job: JobRecord, track: _Track) -> list[JobAdvanced]:
        resumed = max(track.resumed.values())
        first = not track.told_first and track.common_step > resumed
        caught_up = not track.told_caught_up and track.common_step >= job.high_step
        if not first and not (caught_up and track.told_first):
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

    def stalled(self, job: JobRecord, now_s: float, limit_s: float) -> float | None:
        """Seconds without a common step when that is over the limit, told once."""
        if job.state is not JobState.RUNNING:
            return None
        track = self._tracks.get(job.job_id)
        if track is None or track.attempt != job.attempt:
            # Nobody has said a word since the controller started: it may hang all the same.
            self._tracks[job.job_id] = _Track(attempt=job.attempt, changed_s=now_s)
            return None
        silent_s = now_s - track.changed_s
        if silent_s < limit_s or track.told_stalled:
            return None
        track.told_stalled = True
        return silent_s
