"""Whether a job stands still, from what agents say of their ranks.

Agents learn how long a rank may stand in each phase, and say in heartbeats for how long it
has. A job hangs when that is too long for all of its ranks, or when the kernel does not run
one of them; who is to blame is worked out apart (`judgement`).

What does not belong here: limits on steps that are not completed, whatever ranks say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from controller.core.edge.judgement import HangJudgement, HangSign, is_over, is_stopped
from controller.core.edge.settings import SettingsTable
from controller.core.kinds import Cause
from controller.core.records import JobRecord
from outlast.ids import Attempt, JobId
from outlast.v1 import agents_pb2


@dataclass(slots=True, kw_only=True)
class _Over:
    """Ranks of a job's newest attempt that stand for too long, as far as is known."""

    attempt: int
    ranks: set[int] = field(default_factory=set)
    # How often one of them has moved again.
    num_moved: int = 0


class HangTable:
    """The newest summary of each rank of live jobs, and which attempts were said to hang."""

    def __init__(
        self,
        settings: SettingsTable,
        done_of: Callable[[JobId], Collection[int]] = lambda job: (),
    ) -> None:
        """`done_of` gives the ranks of a job that have done all they were to do, and ended."""
        self._settings = settings
        self._done_of = done_of
        self._ranks: dict[JobId, dict[int, agents_pb2.RankSummary]] = {}
        self._over: dict[JobId, _Over] = {}
        # The attempt of each job that was last said to hang.
        self._reported: dict[JobId, Attempt] = {}
        self._judgements: list[HangJudgement] = []

    def note(self, summary: agents_pb2.RankSummary) -> None:
        """A heartbeat had it."""
        job = JobId(summary.job_id)
        self._ranks.setdefault(job, {})[summary.rank] = summary
        over = self._over.get(job)
        if over is None or over.attempt < summary.attempt:
            over = self._over[job] = _Over(attempt=summary.attempt)
        if over.attempt != summary.attempt:
            return
        if is_over(summary):
            over.ranks.add(summary.rank)
        elif summary.rank in over.ranks:
            over.ranks.remove(summary.rank)
            over.num_moved += 1

    def forget(self, job: JobId) -> None:
        self._ranks.pop(job, None)
        self._over.pop(job, None)
        self._reported.pop(job, None)

    def is_reported(self, job: JobRecord) -> bool:
        """Whether this attempt was said to hang."""
        return self._reported.get(job.job_id) == job.attempt

    def summaries(self, job: JobRecord) -> dict[int, agents_pb2.RankSummary]:
        """What was last heard of each rank of the job's present attempt."""
        return {
            rank: summary
            for rank, summary in self._ranks.get(job.job_id, {}).items()
            if summary.attempt == job.attempt
        }

    def some_summaries(self, job: JobRecord, ranks: range) -> list[agents_pb2.RankSummary]:
        """What was last heard of these ranks of the job's present attempt."""
        seen = self._ranks.get(job.job_id, {})
        found = map(seen.get, ranks)
        return [
            summary for summary in found if summary is not None and summary.attempt == job.attempt
        ]

    # That a job hangs

    def heard(self, job: JobRecord, ranks: Sequence[agents_pb2.RankSummary], wall_s: float) -> None:
        """A job with a stopped rank, or all of whose ranks stand for too long.

        `ranks` are those of the node that has just been heard.
        """
        if self.is_reported(job) or self._mode(job) == "off":
            return
        stopped = tuple(summary for summary in ranks if is_stopped(summary))
        if stopped:
            self._reported[job.job_id] = job.attempt
            self._ask(job, HangSign.STOPPED, wall_s, stopped=stopped)
        # While some rank moves nobody looks at all of them.
        elif self._all_stand(job):
            self._reported[job.job_id] = job.attempt
            self._ask(job, HangSign.ALL_STAND, wall_s)

    def start_is_late(self, job: JobRecord, wall_s: float) -> None:
        """The time limit of a start is about to end; reported once."""
        if self.is_reported(job):
            return
        self._reported[job.job_id] = job.attempt
        limit_s = self._settings.of(job).first_step_timeout_s
        limit = f"recovery.first_step_timeout_s is {limit_s:g} s"
        self._ask(job, HangSign.NO_FIRST_STEP, wall_s, stalled_s=limit_s, limit=limit)

    def stalled(self, job: JobRecord, stalled_s: float, wall_s: float) -> None:
        """No step was completed for longer than the job allows."""
        limit = f"recovery.hang_timeout_s is {self._settings.of(job).hang_timeout_s:g} s"
        self._ask(job, HangSign.NO_STEP, wall_s, stalled_s=stalled_s, limit=limit)

    # Who holds it up

    def _ask(
        self,
        job: JobRecord,
        sign: HangSign,
        wall_s: float,
        *,
        stalled_s: float | None = None,
        limit: str = "",
        stopped: Sequence[agents_pb2.RankSummary] = (),
    ) -> None:
        done = self._done_of(job.job_id)
        is_of_ranks = sign in (HangSign.STOPPED, HangSign.ALL_STAND)
        self._judgements.append(
            HangJudgement(
                job_id=job.job_id,
                attempt=job.attempt,
                sign=sign,
                world_size=job.plan.world_size,
                layout=self._settings.of(job).layout,
                summaries={
                    rank: summary
                    for rank, summary in self.summaries(job).items()
                    if rank not in done
                },
                done=tuple(done),
                wall_s=wall_s,
                stalled_s=stalled_s,
                limit=limit,
                stopped=stopped,
                is_logged=is_of_ranks and self._mode(job) == "log",
                deadline_s=job.deadline_s,
                num_moved=self._num_moved(job),
            )
        )

    @property
    def has_judgements(self) -> bool:
        """Whether `take_judgements` has something to give."""
        return bool(self._judgements)

    def take_judgements(self) -> list[HangJudgement]:
        """What is to be worked out, each once."""
        taken, self._judgements = self._judgements, []
        return taken

    def still_stands(self, job: JobRecord, judgement: HangJudgement) -> bool:
        """Whether the ranks that were said to stand have not moved since."""
        if not judgement.stopped:
            return self._all_stand(job) and self._num_moved(job) == judgement.num_moved
        seen: Mapping[int, agents_pb2.RankSummary] = self._ranks.get(job.job_id, {})
        newest = (seen.get(each.rank) for each in judgement.stopped)
        return all(
            summary is not None
            and summary.attempt == job.attempt
            and is_stopped(summary)
            and summary.stalled_s >= before.stalled_s
            for before, summary in zip(judgement.stopped, newest, strict=True)
        )

    def take_back(self, judgement: HangJudgement) -> None:
        """It was overtaken: the attempt may be said to hang again."""
        is_reported = self._reported.get(judgement.job_id) == judgement.attempt
        if is_reported and judgement.sign is not HangSign.NO_STEP:
            del self._reported[judgement.job_id]

    def _all_stand(self, job: JobRecord) -> bool:
        over = self._over.get(job.job_id)
        if over is None or over.attempt != job.attempt or not over.ranks:
            return False
        done, world_size = self._done_of(job.job_id), job.plan.world_size
        if not done:
            return len(over.ranks) >= world_size
        # The others wait for one that has left them. What it said last counts no more.
        num_over = len(over.ranks.difference(done))
        return num_over > 0 and num_over + len(done) >= world_size

    def _num_moved(self, job: JobRecord) -> int:
        over = self._over.get(job.job_id)
        return 0 if over is None else over.num_moved

    def _mode(self, job: JobRecord) -> str:
        return self._settings.of(job).modes.get(Cause.HANG, "act")
