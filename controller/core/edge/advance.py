"""What agents say of completed steps, with what goes along with the first ones.

The table of steps is in `progress`; here are the split of a start's time and the numeric
environment, which reach the machine together with an attempt's first step.
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.core.edge.progress import ProgressTable
from controller.core.environments import MAX_CHANGES, EnvironmentTable
from controller.core.events import Event, JobAdvanced
from controller.core.frozen import replace
from controller.core.records import JobRecord
from outlast.ids import Attempt, JobId, NodeId
from outlast.v1 import agents_pb2

# Parts of a restart, as agents report them, in their order.
START_PARTS = ("fork", "groups", "model", "restore", "first_step")


class AdvanceTable:
    """How far each job is."""

    def __init__(self) -> None:
        self.progress = ProgressTable()
        # Split of the slowest start by job: the attempt, when its first step ended, the parts.
        self._splits: dict[JobId, tuple[int, float, str]] = {}
        self._environments = EnvironmentTable()

    def forget(self, job: JobId) -> None:
        self.progress.forget(job)
        self._splits.pop(job, None)
        self._environments.forget(job)

    def reported(
        self, job: JobRecord | None, node: NodeId, event: agents_pb2.AgentEvent, now_s: float
    ) -> list[Event]:
        """An agent says how far its ranks are: after a start, in a new session and at the end."""
        made, job_id = event.progress, JobId(event.job_id)
        self._note_split(job_id, event.attempt, made)
        self._environments.reported(
            job_id,
            Attempt(event.attempt),
            node,
            dict(made.environment),
            tuple(made.environment_changes)[:MAX_CHANGES],
            tuple(made.data_left_out)[:MAX_CHANGES],
            num_samples=made.num_samples,
        )
        if job is None:
            return []
        return self._made(
            job,
            node,
            Attempt(event.attempt),
            completed_step=made.completed_step,
            resumed_step=made.resumed_step,
            at_s=made.completed_at_s,
            now_s=now_s,
        )

    def beat(
        self,
        job: JobRecord,
        node: NodeId,
        ranks: Sequence[agents_pb2.RankSummary],
        at_s: float,
        now_s: float,
    ) -> list[Event]:
        """A heartbeat of `at_s`, by the wall clock, has these ranks of one attempt."""
        slowest = min(ranks, key=lambda rank: rank.completed_step)
        return self._made(
            job,
            node,
            Attempt(slowest.attempt),
            completed_step=slowest.completed_step,
            resumed_step=min(rank.resumed_step for rank in ranks),
            at_s=at_s - slowest.step_age_s,
            now_s=now_s,
        )

    def _made(
        self,
        job: JobRecord,
        node: NodeId,
        attempt: Attempt,
        *,
        completed_step: int,
        resumed_step: int,
        at_s: float,
        now_s: float,
    ) -> list[Event]:
        advanced = self.progress.made(
            job,
            node,
            attempt=attempt,
            completed_step=completed_step,
            resumed_step=resumed_step,
            at_s=at_s,
            now_s=now_s,
        )
        return [
            replace(
                event,
                split=self._split_of(event),
                environment=self._environments.of(job),
                environment_changes=self._environments.changes(job),
                data_left_out=self._environments.left_out(job),
                num_samples=self._environments.num_samples(job),
            )
            for event in advanced
        ]

    def _note_split(self, job_id: JobId, attempt: int, made: agents_pb2.ProgressMade) -> None:
        if not made.start_split_s:
            return
        known = self._splits.get(job_id)
        is_newer = known is None or known[0] < attempt
        if is_newer or (known is not None and known[0] == attempt and known[1] < _start_s(made)):
            self._splits[job_id] = (attempt, _start_s(made), _split_text(made))

    def _split_of(self, event: JobAdvanced) -> str:
        known = self._splits.get(event.job_id)
        return known[2] if known is not None and known[0] == event.attempt else ""


def _start_s(made: agents_pb2.ProgressMade) -> float:
    return sum(made.start_split_s.values())


def _split_text(made: agents_pb2.ProgressMade) -> str:
    """The parts of a start in words: `fork 0.012 s, groups 0.150 s`."""
    split = made.start_split_s
    # A protobuf map has no order; a restart has.
    return ", ".join(f"{part} {split[part]:.3f} s" for part in START_PARTS if part in split)
