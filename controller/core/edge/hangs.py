"""Whether a job stands still, and who holds it up: from what agents say of their ranks.

Agents learn how long a rank may stand in each phase, and say in heartbeats for how long it
has. A job hangs when that is too long for all of its ranks, or when the kernel does not run
one of them; who is to blame is concluded in `diagnostics.core.hang`.

What does not belong here: limits on steps that are not completed, whatever ranks say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from controller.core.edge.operations import operation_of
from controller.core.edge.settings import SettingsTable
from controller.core.events import Detected, Event, JobStalled
from controller.core.kinds import Cause
from controller.core.records import JobRecord
from diagnostics.core.hang import HangVerdict, analyse
from diagnostics.core.pace import STOPPED_STATE, Standing, all_over
from diagnostics.core.rank_facts import Groups, RankFacts, facts_of
from diagnostics.core.rank_words import where_all_stand
from outlast.blackbox.records import Group, Phase, member
from outlast.ids import Attempt, JobId
from outlast.layout import Layout
from outlast.v1 import agents_pb2

# The rarest, in the message of a hang that is only logged.
_MAX_PLACES = 4


@dataclass(slots=True, kw_only=True)
class _Over:
    """Ranks of a job's newest attempt that stand for too long, as far as is known."""

    attempt: int
    ranks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What is known of all ranks of a job when it hangs."""

    facts: list[RankFacts]
    # In words, which ranks no fact is known of.
    left_out: list[str]
    missing: list[int]
    layout: Layout

    def verdict(self) -> HangVerdict:
        return analyse(self.facts, self.missing, layout=self.layout)

    def places(self) -> list[str]:
        """Where all ranks stand, and which ranks nothing is known of."""
        return [*where_all_stand(self.facts), *self.left_out]


class HangTable:
    """The newest summary of each rank of live jobs, and which attempts were said to hang."""

    def __init__(self, settings: SettingsTable) -> None:
        self._settings = settings
        self._ranks: dict[JobId, dict[int, agents_pb2.RankSummary]] = {}
        self._over: dict[JobId, _Over] = {}
        # The attempt of each job that was last said to hang.
        self._told: dict[JobId, Attempt] = {}

    def note(self, summary: agents_pb2.RankSummary) -> None:
        """A heartbeat had it."""
        job = JobId(summary.job_id)
        self._ranks.setdefault(job, {})[summary.rank] = summary
        over = self._over.get(job)
        if over is None or over.attempt < summary.attempt:
            over = self._over[job] = _Over(attempt=summary.attempt)
        if over.attempt != summary.attempt:
            return
        if _standing(summary).is_over:
            over.ranks.add(summary.rank)
        else:
            over.ranks.discard(summary.rank)

    def forget(self, job: JobId) -> None:
        self._ranks.pop(job, None)
        self._over.pop(job, None)
        self._told.pop(job, None)

    def is_told(self, job: JobRecord) -> bool:
        """Whether this attempt was said to hang."""
        return self._told.get(job.job_id) == job.attempt

    def summaries(self, job: JobRecord) -> dict[int, agents_pb2.RankSummary]:
        """What was last heard of each rank of the job's present attempt."""
        return {
            rank: summary
            for rank, summary in self._ranks.get(job.job_id, {}).items()
            if summary.attempt == job.attempt
        }

    def some_summaries(
        self, job: JobRecord, first: int, stride: int
    ) -> list[agents_pb2.RankSummary]:
        """What was last heard of every so manieth rank of the job's present attempt."""
        seen = self._ranks.get(job.job_id, {})
        found = (seen.get(rank) for rank in range(first, job.plan.world_size, stride))
        return [
            summary for summary in found if summary is not None and summary.attempt == job.attempt
        ]

    def heard(
        self, job: JobRecord, ranks: Sequence[agents_pb2.RankSummary], wall_s: float
    ) -> list[Event]:
        """A job with a stopped rank, or all of whose ranks stand for too long.

        `ranks` are those of the node that has just been heard.
        """
        if self.is_told(job) or self._mode(job) == "off":
            return []
        stopped = [summary for summary in ranks if _is_stopped(summary)]
        if stopped:
            # What the others do decides nothing: they will wait for this one.
            facts, _ = _rank_facts(stopped, self._layout_of(job), wall_s)
            return self._hang(job, _standing(stopped[0]), wall_s, analyse(facts))
        # While some rank moves nobody looks at all of them.
        over = self._over.get(job.job_id)
        if over is None or len(over.ranks) < job.plan.world_size:
            return []
        standings = [_standing(summary) for summary in self.summaries(job).values()]
        if len(standings) < job.plan.world_size or not all_over(standings):
            return []
        least = min(standings, key=lambda standing: standing.stands_s)
        return self._hang(job, least, wall_s)

    def start_is_late(self, job: JobRecord, wall_s: float) -> list[Event]:
        """The time limit of a start is about to end; reported once."""
        if self.is_told(job):
            return []
        self._told[job.job_id] = job.attempt
        limit_s = self._settings.of(job).first_step_timeout_s
        limit = f"recovery.first_step_timeout_s is {limit_s:g} s"
        return [self._stalled(job, limit_s, limit, wall_s)]

    def stalled(self, job: JobRecord, stalled_s: float, wall_s: float) -> list[Event]:
        """No step was completed for longer than the job allows."""
        limit = f"recovery.hang_timeout_s is {self._settings.of(job).hang_timeout_s:g} s"
        return [self._stalled(job, stalled_s, limit, wall_s)]

    def _hang(
        self,
        job: JobRecord,
        standing: Standing,
        wall_s: float,
        verdict: HangVerdict | None = None,
    ) -> list[Event]:
        """A hang, for which `verdict` is to blame or, unless given, what all ranks show."""
        self._told[job.job_id] = job.attempt
        if self._mode(job) == "log":
            look = self._look(job, wall_s)
            reason = (verdict or look.verdict()).reason
            stood = "; ".join(look.places()[:_MAX_PLACES])
            words = f"the job stood still for {standing.stands_s:.1f} s; {reason}; {stood}"
            return [_logged_hang(job, words, wall_s)]
        limit = f"at most {standing.limit_s or 0.0:.1f} s: {standing.source}"
        return [self._stalled(job, standing.stands_s, limit, wall_s, verdict)]

    def _stalled(
        self,
        job: JobRecord,
        stalled_s: float,
        limit: str,
        wall_s: float,
        verdict: HangVerdict | None = None,
    ) -> JobStalled:
        look = self._look(job, wall_s)
        verdict = verdict or look.verdict()
        return JobStalled(
            job_id=job.job_id,
            attempt=job.attempt,
            stalled_s=stalled_s,
            culprit_ranks=tuple(r for r in verdict.culprits if r < job.plan.world_size),
            detail=verdict.reason,
            limit=limit,
            stood="; ".join(look.places()),
            is_users=verdict.is_users,
        )

    def _look(self, job: JobRecord, wall_s: float) -> _Look:
        seen, layout = self.summaries(job), self._layout_of(job)
        facts, left_out = _rank_facts(seen.values(), layout, wall_s)
        missing = [rank for rank in range(job.plan.world_size) if rank not in seen]
        return _Look(facts=facts, left_out=left_out, missing=missing, layout=layout)

    def _mode(self, job: JobRecord) -> str:
        return self._settings.of(job).modes.get(Cause.HANG, "act")

    def _layout_of(self, job: JobRecord) -> Layout:
        return self._settings.of(job).layout


def _rank_facts(
    summaries: Iterable[agents_pb2.RankSummary], layout: Layout, wall_s: float
) -> tuple[list[RankFacts], list[str]]:
    """The facts, and in words which ranks have none: an agent of another version says
    something unknown, and there is one rank less to reason with."""
    facts: list[RankFacts] = []
    left_out: list[str] = []
    groups = Groups(layout)
    for summary in summaries:
        try:
            facts.append(
                facts_of(
                    summary.rank,
                    member(Phase, summary.phase),
                    operation_of(summary),
                    groups,
                    since_s=wall_s - summary.last_op_age_s,
                    entered={member(Group, name): seq for name, seq in summary.entered.items()},
                    process_state=summary.process_state,
                )
            )
        except ValueError as error:
            left_out.append(f"rank {summary.rank} is left out: {error}")
    return facts, left_out


def _logged_hang(job: JobRecord, words: str, at_s: float) -> Detected:
    return Detected(
        job_id=job.job_id,
        attempt=job.attempt,
        cause=Cause.HANG,
        node=None,
        rank=None,
        detail=words,
        at_s=at_s,
    )


def _standing(summary: agents_pb2.RankSummary) -> Standing:
    return Standing(
        stands_s=summary.stands_s,
        limit_s=summary.stand_limit_s or None,
        source=summary.stand_limit_source,
    )


def _is_stopped(summary: agents_pb2.RankSummary) -> bool:
    """Whether its process has been stopped for too long: it does not go on by itself."""
    return summary.process_state == STOPPED_STATE and _standing(summary).is_over
