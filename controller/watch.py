"""What is merely seen of nodes and jobs, between the agents' messages and the machine.

Heartbeats and progress end here: they update tables, and only changes come out
as events. Times here are of the monotonic clock, unless a name says otherwise,
so that a step of the wall clock silences nobody.

What does not belong here: judging. The machine does that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from controller.core.environments import MAX_CHANGES, EnvironmentTable
from controller.core.events import Detected, Event, JobAdvanced, JobStalled
from controller.core.facts import Fact, JobPut, NodePut, State
from controller.core.liveness import Limits, LivenessTable
from controller.core.progress import ProgressTable
from controller.core.records import Cause, JobRecord
from controller.core.states import AT_WORK, AWAY, TERMINAL, JobState
from controller.operations import operation_of
from controller.specs import spec_of
from diagnostics.core.hang import (
    HangVerdict,
    RankFacts,
    analyse,
    facts_of,
    where_all_stand,
)
from diagnostics.core.pace import STOPPED_STATE, Standing, all_over
from outlast.ids import Attempt, JobId, NodeId
from outlast.layout import Layout
from outlast.notes import Group, Phase, member
from outlast.recovery import RecoverySpec
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

# The rarest, in what is told of a hang that is only logged.
_MAX_PLACES = 4
# How often somebody asks for jobs that stand still.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A rank as the last heartbeat showed it."""

    at_s: float
    summary: agents_pb2.RankSummary


# Parts of a restart, as agents report them, in their order.
START_PARTS = ("fork", "groups", "model", "restore", "first_step")


class Watch:
    """The tables at the edge. Events that come out are for the machine, at once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._liveness = LivenessTable()
        self._progress = ProgressTable()
        # How often each node's agent was told to send a heartbeat.
        self._periods_s: dict[NodeId, float] = {}
        self._ranks: dict[JobId, dict[int, _Seen]] = {}
        # Split of the slowest start by job: the attempt, when its first step ended, the parts.
        self._splits: dict[JobId, tuple[int, float, str]] = {}
        self._environments = EnvironmentTable()
        # The attempt of each job that was last said to hang.
        self._told_hangs: dict[JobId, Attempt] = {}

    # Nodes

    def expect_known(self, now_s: float) -> None:
        """After a start: every node that is not given up should be heard of soon."""
        for node in self._state.nodes.values():
            if node.state not in AWAY:
                self._expect(node.node, now_s)

    def joined(self, node: NodeId, now_s: float, period_s: float) -> list[Event]:
        """An agent opened a session and was told to send a heartbeat every `period_s`."""
        self._periods_s[node] = period_s
        self._expect(node, now_s)
        return [*self._liveness.heard(node, now_s)]

    def told_period(self, node: NodeId, period_s: float, now_s: float) -> None:
        """The agent was told to send heartbeats more or less often from now on."""
        self._periods_s[node] = period_s
        self._expect(node, now_s)

    def wanted_period_s(self, node: NodeId) -> float:
        """How often the agent should send a heartbeat for the job on its node."""
        return min(
            (recovery.heartbeat_period_s for recovery in self._recovery_on(node)),
            default=RecoverySpec().heartbeat_period_s,
        )

    def absence_limit_s(self, node: NodeId) -> float:
        """How long workers of the node may run without any controller."""
        return min(
            (recovery.controller_absence_limit_s for recovery in self._recovery_on(node)),
            default=RecoverySpec().controller_absence_limit_s,
        )

    def heard(self, node: NodeId, now_s: float) -> list[Event]:
        """Any message of an agent."""
        return [*self._liveness.heard(node, now_s)]

    def heartbeat(self, node: NodeId, beat: agents_pb2.Heartbeat, now_s: float) -> list[Event]:
        """A heartbeat: remembered, and as a rule of no interest to the machine."""
        events: list[Event] = []
        completed: dict[tuple[JobId, Attempt], list[agents_pb2.RankSummary]] = {}
        for summary in beat.ranks:
            job_id = JobId(summary.job_id)
            job = self._state.jobs.get(job_id)
            if job is None or job.state in TERMINAL:
                continue
            seen = _Seen(at_s=now_s, summary=summary)
            self._ranks.setdefault(job_id, {})[summary.rank] = seen
            completed.setdefault((job_id, Attempt(summary.attempt)), []).append(summary)
        for (job_id, attempt), ranks in completed.items():
            job = self._state.jobs[job_id]
            if job.state in AT_WORK and attempt == job.attempt:
                events += self._hangs(job, ranks, beat.at_s)
            # Only a running job: how a start went is told by the agent's own event. After
            # a restart of the controller this is what notices that a job stands still.
            if job.state is JobState.RUNNING:
                slowest = min(ranks, key=lambda rank: rank.completed_step)
                events += self._made(
                    node,
                    job_id,
                    attempt,
                    completed_step=slowest.completed_step,
                    resumed_step=min(rank.resumed_step for rank in ranks),
                    at_s=beat.at_s - slowest.step_age_s,
                    now_s=now_s,
                )
        return events

    def heard_s(self, node: NodeId) -> float | None:
        """When a node was last heard."""
        return self._liveness.heard_s(node)

    def is_late(self, node: NodeId) -> bool:
        """Whether a node is being watched and has been silent for longer than it may be."""
        return self._liveness.is_late(node)

    def expire(self, now_s: float) -> list[Event]:
        """Nodes that have been silent for too long."""
        return [*self._liveness.expire(now_s)]

    def next_expiry_s(self) -> float | None:
        return self._liveness.next_expiry_s()

    # Jobs

    def progress_made(
        self, node: NodeId, event: agents_pb2.AgentEvent, now_s: float
    ) -> list[Event]:
        """An agent says how far its ranks are."""
        made = event.progress
        job_id = JobId(event.job_id)
        self._note_split(job_id, event.attempt, made)
        self._environments.told(
            job_id,
            Attempt(event.attempt),
            node,
            dict(made.environment),
            tuple(made.environment_changes)[:MAX_CHANGES],
            tuple(made.data_left_out)[:MAX_CHANGES],
        )
        return self._made(
            node,
            job_id,
            Attempt(event.attempt),
            completed_step=made.completed_step,
            resumed_step=made.resumed_step,
            at_s=made.completed_at_s,
            now_s=now_s,
        )

    def stalled(self, now_s: float, now_wall_s: float) -> list[Event]:
        """Jobs that have completed no step for longer than they allow."""
        events: list[Event] = []
        for job in self._state.jobs.values():
            if job.state not in AT_WORK:
                continue
            recovery = spec_of(job.spec_json).recovery
            if job.state is JobState.STARTING and self._never_began(job, now_wall_s):
                limit_s = recovery.first_step_timeout_s
                limit = f"recovery.first_step_timeout_s is {limit_s:g} s"
                events.append(self._stalled(job, limit_s, limit, now_wall_s))
            stalled_s = self._progress.stalled(job, now_s, recovery.hang_timeout_s)
            if stalled_s is not None:
                limit = f"recovery.hang_timeout_s is {recovery.hang_timeout_s:g} s"
                events.append(self._stalled(job, stalled_s, limit, now_wall_s))
        return events

    def _never_began(self, job: JobRecord, now_wall_s: float) -> bool:
        """Whether the patience with a start ends before the next look; told once.

        The machine would end it too, and not know who held the others up.
        """
        is_over = job.deadline_s is not None and job.deadline_s - now_wall_s <= LOOK_S
        if not is_over or self._told_hangs.get(job.job_id) == job.attempt:
            return False
        self._told_hangs[job.job_id] = job.attempt
        return True

    def _stalled(
        self,
        job: JobRecord,
        stalled_s: float,
        limit: str,
        now_wall_s: float,
        verdict: HangVerdict | None = None,
    ) -> JobStalled:
        verdict = verdict or self._who_hangs(job, now_wall_s)
        return JobStalled(
            job_id=job.job_id,
            attempt=job.attempt,
            stalled_s=stalled_s,
            culprit_ranks=tuple(r for r in verdict.culprits if r < job.plan.world_size),
            detail=verdict.reason,
            limit=limit,
            stood="; ".join(where_all_stand(list(self._facts_of(job, now_wall_s)))),
            is_users=verdict.is_users,
        )

    def _hangs(
        self, job: JobRecord, ranks: Sequence[agents_pb2.RankSummary], now_wall_s: float
    ) -> list[Event]:
        """A job with a stopped rank, or all of whose ranks stand for too long.

        `ranks` are those of the node that has just been heard.
        """
        if self._told_hangs.get(job.job_id) == job.attempt:
            return []
        stopped = [summary for summary in ranks if _is_stopped(summary)]
        if stopped:
            # What the others do decides nothing: they will wait for this one.
            verdict = analyse(list(_rank_facts(stopped, _layout_of(job), now_wall_s)))
            return self._hang(job, _standing(stopped[0]), verdict, now_wall_s)
        # A node that moves says that not all stand, without a look at the others.
        if not all_over(map(_standing, ranks)):
            return []
        standings = [_standing(summary) for summary in self.summaries(job).values()]
        if len(standings) < job.plan.world_size or not all_over(standings):
            return []
        least = min(standings, key=lambda standing: standing.stands_s)
        return self._hang(job, least, self._who_hangs(job, now_wall_s), now_wall_s)

    def _hang(
        self, job: JobRecord, standing: Standing, verdict: HangVerdict, now_wall_s: float
    ) -> list[Event]:
        mode = spec_of(job.spec_json).detectors.hang
        if mode == "off":
            return []
        self._told_hangs[job.job_id] = job.attempt
        if mode == "log":
            places = where_all_stand(list(self._facts_of(job, now_wall_s)))
            stood = "; ".join(places[:_MAX_PLACES])
            words = f"the job stood still for {standing.stands_s:.1f} s; {verdict.reason}; {stood}"
            return [_logged_hang(job, words, now_wall_s)]
        limit = f"at most {standing.limit_s or 0.0:.1f} s: {standing.source}"
        return [self._stalled(job, standing.stands_s, limit, now_wall_s, verdict)]

    def refresh(self, facts: Iterable[Fact], now_s: float) -> list[NodeId]:
        """These facts are part of the state: some things are over, and other limits may hold
        for the nodes that come back."""
        changed: dict[NodeId, None] = {}
        for fact in facts:
            if isinstance(fact, NodePut):
                changed[fact.node.node] = None
            elif isinstance(fact, JobPut) and fact.job.state in TERMINAL:
                self._forget(fact.job.job_id)
        for node in changed:
            if self._state.nodes[node].state in AWAY:
                self._liveness.forget(node)
            else:
                self._expect(node, now_s)
        return list(changed)

    def _forget(self, job_id: JobId) -> None:
        """Of a job that has ended nothing is expected any more."""
        self._ranks.pop(job_id, None)
        self._splits.pop(job_id, None)
        self._environments.forget(job_id)
        self._told_hangs.pop(job_id, None)
        self._progress.forget(job_id)

    def _expect(self, node: NodeId, now_s: float) -> None:
        self._liveness.expect(node, now_s, self._limits_for(node))

    def _limits_for(self, node: NodeId) -> Limits:
        """The strictest limits of the jobs on a node."""
        given = self._recovery_on(node) or [RecoverySpec()]
        period_s = min(recovery.heartbeat_period_s for recovery in given)
        # An agent that was told to be slower must not be late for it.
        slower = max(1.0, self._periods_s.get(node, period_s) / period_s)
        return Limits(
            late_s=slower * min(recovery.heartbeat_late_s for recovery in given),
            lost_s=slower * min(recovery.heartbeat_lost_s for recovery in given),
            silent_s=slower * min(recovery.heartbeat_silent_s for recovery in given),
        )

    def _recovery_on(self, node: NodeId) -> list[RecoverySpec]:
        record = self._state.nodes.get(node)
        job = None if record is None or record.job is None else self._state.jobs[record.job]
        return [] if job is None else [spec_of(job.spec_json).recovery]

    def _made(
        self,
        node: NodeId,
        job_id: JobId,
        attempt: Attempt,
        *,
        completed_step: int,
        resumed_step: int,
        at_s: float,
        now_s: float,
    ) -> list[Event]:
        job = self._state.jobs.get(job_id)
        if job is None:
            return []
        advanced = self._progress.made(
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

    def summaries(self, job: JobRecord) -> dict[int, agents_pb2.RankSummary]:
        """What was last heard of each rank of the job's present attempt."""
        return {
            rank: entry.summary
            for rank, entry in self._ranks.get(job.job_id, {}).items()
            if entry.summary.attempt == job.attempt
        }

    def some_summaries(
        self, job: JobRecord, first: int, stride: int
    ) -> list[agents_pb2.RankSummary]:
        """What was last heard of every so manieth rank of the job's present attempt."""
        seen = self._ranks.get(job.job_id, {})
        found = (seen.get(rank) for rank in range(first, job.plan.world_size, stride))
        return [
            entry.summary
            for entry in found
            if entry is not None and entry.summary.attempt == job.attempt
        ]

    def _who_hangs(self, job: JobRecord, now_wall_s: float) -> HangVerdict:
        seen = self.summaries(job)
        missing = [rank for rank in range(job.plan.world_size) if rank not in seen]
        facts = list(self._facts_of(job, now_wall_s))
        return analyse(facts, missing, layout=_layout_of(job))

    def _facts_of(self, job: JobRecord, now_wall_s: float) -> Iterable[RankFacts]:
        return _rank_facts(self.summaries(job).values(), _layout_of(job), now_wall_s)


def _layout_of(job: JobRecord) -> Layout:
    return spec_of(job.spec_json).layout


def _rank_facts(
    summaries: Iterable[agents_pb2.RankSummary], layout: Layout, now_wall_s: float
) -> Iterable[RankFacts]:
    for summary in summaries:
        try:
            yield facts_of(
                summary.rank,
                member(Phase, summary.phase),
                operation_of(summary),
                layout,
                since_s=now_wall_s - summary.last_op_age_s,
                entered={member(Group, name): seq for name, seq in summary.entered.items()},
                process_state=summary.process_state,
            )
        except ValueError as error:
            # An agent of another version: one rank less to reason with.
            logger.warning("rank left out of the analysis: job=%s %s", summary.job_id, error)


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


def _start_s(made: agents_pb2.ProgressMade) -> float:
    return sum(made.start_split_s.values())


def _split_text(made: agents_pb2.ProgressMade) -> str:
    """The parts of a start in words: `fork 0.012 s, groups 0.150 s`."""
    split = made.start_split_s
    # A protobuf map has no order; a restart has.
    return ", ".join(f"{part} {split[part]:.3f} s" for part in START_PARTS if part in split)
