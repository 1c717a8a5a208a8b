"""Who holds up a job that hangs, worked out from what was last heard of all its ranks.

The work grows with the ranks: of 100,000 it takes a second or so, in which heartbeats have to be
handled. So the edge only asks, with all that the answer depends on; the answer is worked out
wherever there is time for it, and the edge drops it when the job has moved meanwhile.

What does not belong here: that a job hangs (`hangs`), and who is to blame for what is seen
(`diagnostics.core.hang`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.core.edge.operations import operation_of
from controller.core.events import Detected, JobStalled
from controller.core.kinds import Cause
from diagnostics.core.describe_ranks import name, where_all_stand
from diagnostics.core.hang import HangKind, HangVerdict, analyse
from diagnostics.core.pace import STOPPED_STATE
from diagnostics.core.rank_facts import Groups, RankFacts, facts_of
from outlast.blackbox.records import Group, Phase, member
from outlast.ids import Attempt, JobId
from outlast.layout import Layout
from outlast.v1 import agents_pb2

# The rarest, in the message of a hang that is only logged.
_MAX_PLACES = 4


class HangSign(StrEnum):
    """Why a job is said to hang."""

    STOPPED = "stopped"  # the kernel does not run one of its ranks
    ALL_STAND = "all stand"  # each of its ranks, for longer than it should
    NO_STEP = "no step"  # none was completed for longer than the job allows
    NO_FIRST_STEP = "no first step"  # the patience with its start is about to end


@dataclass(frozen=True, slots=True, kw_only=True)
class HangJudgement:
    """A job hangs; `judge` says who holds it up."""

    job_id: JobId
    attempt: Attempt
    sign: HangSign
    world_size: int
    layout: Layout
    # What was last heard of its ranks, by rank. Nobody changes these messages.
    summaries: Mapping[int, agents_pb2.RankSummary]
    wall_s: float
    # How long it has stood and may stand; without them the rank that has stood least says so.
    stalled_s: float | None = None
    limit: str = ""
    # Ranks that have done all they were to do, and ended: they hold nobody up by a fault of theirs.
    done: Sequence[int] = ()
    # Ranks that the kernel does not run: what the others do decides nothing, they wait for these.
    stopped: Sequence[agents_pb2.RankSummary] = ()
    # Its job wants hangs to be logged only.
    is_logged: bool = False
    # Of a start: when the patience with it was to end.
    deadline_s: float | None = None
    # How often a rank that stood had moved again by then: the answer is of this standstill only.
    num_moved: int = 0

    def judge(self) -> JobStalled | Detected:
        """The event for the machine. Slow where there are many ranks; pure."""
        facts, left_out = rank_facts(self.summaries.values(), self.layout, self.wall_s)
        verdict = self._verdict(facts)
        stood = [*where_all_stand(facts), *left_out, *self._ended()]
        stalled_s, limit = self._standing()
        if self.is_logged:
            places = "; ".join(stood[:_MAX_PLACES])
            message = f"the job stood still for {stalled_s:.1f} s; {verdict.reason}; {places}"
            return self._logged(message)
        return JobStalled(
            job_id=self.job_id,
            attempt=self.attempt,
            stalled_s=stalled_s,
            culprit_ranks=tuple(rank for rank in verdict.culprits if rank < self.world_size),
            detail=verdict.reason,
            limit=limit,
            stood="; ".join(stood),
            is_program_error=verdict.is_program_error,
            are_alike=verdict.kind is HangKind.TRANSPORT,
        )

    def unexplained(self, why: str) -> JobStalled | Detected:
        """The event when the analysis itself has failed: the job hangs all the same."""
        stalled_s, limit = self._standing()
        detail = f"who holds it up is not known: {why}"
        if self.is_logged:
            return self._logged(f"the job stood still for {stalled_s:.1f} s; {detail}")
        return JobStalled(
            job_id=self.job_id,
            attempt=self.attempt,
            stalled_s=stalled_s,
            culprit_ranks=(),
            detail=detail,
            limit=limit,
        )

    def _ended(self) -> list[str]:
        if not self.done:
            return []
        return [f"{name(sorted(self.done))} ended with exit code 0"]

    def _verdict(self, facts: list[RankFacts]) -> HangVerdict:
        if self.stopped:
            return analyse(rank_facts(self.stopped, self.layout, self.wall_s)[0])
        known = {*self.summaries, *self.done}
        missing = [rank for rank in range(self.world_size) if rank not in known]
        return analyse(facts, missing, layout=self.layout)

    def _standing(self) -> tuple[float, str]:
        """For how long it has stood, and what it may."""
        if self.stalled_s is not None:
            return self.stalled_s, self.limit
        least = min(self.stopped or self.summaries.values(), key=lambda each: each.stalled_s)
        if least.reports_no_steps and not self.stopped:
            # A limit of the spec, and known as that where a job passes it again and again.
            return least.stalled_s, least.stall_limit_source
        limit = f"at most {least.stall_limit_s:.1f} s: {least.stall_limit_source}"
        return least.stalled_s, limit

    def _logged(self, message: str) -> Detected:
        return Detected(
            job_id=self.job_id,
            attempt=self.attempt,
            cause=Cause.HANG,
            node=None,
            rank=None,
            detail=message,
            at_s=self.wall_s,
        )


def is_over(summary: agents_pb2.RankSummary) -> bool:
    """Whether a rank stands for longer than it should, if its agent knows how long that is.

    Read as it is, for a large fleet says it 50,000 times a second.
    """
    limit_s = summary.stall_limit_s
    return limit_s != 0.0 and summary.stalled_s > limit_s


def is_stopped(summary: agents_pb2.RankSummary) -> bool:
    """Whether its process has been stopped for too long: it does not go on by itself."""
    return summary.process_state == STOPPED_STATE and is_over(summary)


def rank_facts(
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
                    reports_no_steps=summary.reports_no_steps,
                    stalled_s=summary.stalled_s,
                )
            )
        except ValueError as error:
            left_out.append(f"rank {summary.rank} is left out: {error}")
    return facts, left_out
