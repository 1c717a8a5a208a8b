"""What agents say and what they leave unsaid, turned into events for the machine.

Every message of an agent goes through `handle`; most end here, in tables, and only changes
come out. `wake` is called when `wake_at` says so, and finds what follows from the passing of
time alone: nodes that have been silent and jobs that have completed no step for too long.

Times are of the monotonic clock, so that a step of the wall clock silences nobody; those named
`wall_s` are of the clock in which the machine lives.

What does not belong here: judging. The machine does that. Nor what was not checked: messages
have passed `gate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from controller.core.changes import JobPut, NodePut, State, StateChange
from controller.core.edge.advance import AdvanceTable
from controller.core.edge.clocks import ClockReading, ClockTable
from controller.core.edge.detectors import Detectors
from controller.core.edge.due import DueQueue
from controller.core.edge.hangs import HangTable
from controller.core.edge.judgement import HangJudgement, HangSign
from controller.core.edge.listening import Listening
from controller.core.edge.liveness import Limits, LivenessTable
from controller.core.edge.reports import RanksByAttempt, by_attempt, events_of, node_joined
from controller.core.edge.settings import NO_JOB, JobSettings, SettingsOf, SettingsTable
from controller.core.events import Detected, Event, JobStalled
from controller.core.node_events import NodeClosed
from controller.core.records import JobRecord
from controller.core.states import AT_WORK, AWAY, TERMINAL, JobState
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2

# Before the machine ends its patience with a start, so long: it would not know who held the
# others up.
BEFORE_DEADLINE_S = 1.0
# And longer for this with each rank: five times what the judgement takes on an idle machine.
BEFORE_DEADLINE_S_PER_RANK = 50e-6


class Edge:
    """The tables between agents and the machine. Events that come out are for it, at once."""

    def __init__(
        self, state: State, settings_of: SettingsOf, *, no_job: JobSettings = NO_JOB
    ) -> None:
        """`no_job` is what holds for nodes without a job."""
        self._no_job = no_job
        self.listening = Listening()
        self._state = state
        self._settings = SettingsTable(settings_of)
        self._liveness = LivenessTable()
        self._clocks = ClockTable()
        self._advances = AdvanceTable()
        self._hangs = HangTable(self._settings, lambda job: state.done.get(job, {}))
        self._detectors = Detectors(state, self._settings)
        # The interval between heartbeats that each node's agent was given.
        self._periods_s: dict[NodeId, float] = {}
        # Running jobs by when they stand still for too long, and those that start by when the
        # patience with them is nearly over; the latter by the machine's clock.
        self._stalls: DueQueue[JobId] = DueQueue()
        self._starts: DueQueue[JobId] = DueQueue()

    # What comes in

    def handle(self, node: NodeId, message: agents_pb2.AgentMessage, now_s: float) -> list[Event]:
        """A message of a node's agent, its hello included."""
        match message.WhichOneof("kind"):
            case "hello":
                return self._joined(node, message.hello, now_s)
            case "heartbeat":
                at_s, attempts = message.heartbeat.at_s, by_attempt(message.heartbeat)
                if message.heartbeat.HasField("clock"):
                    self._clocks.heard(node, message.heartbeat.clock, now_s)
                # Before `_heartbeat`, which reports each finding only once: an error here must not
                # lose it.
                detected = self._detectors.heartbeat(attempts, at_s, now_s)
                return [
                    *self.heard(node, now_s),
                    *self._heartbeat(node, attempts, at_s, now_s),
                    *detected,
                ]
            case "event":
                return [*self.heard(node, now_s), *self._event(node, message.event, now_s)]
            case _:
                return self.heard(node, now_s)

    def heard(self, node: NodeId, now_s: float) -> list[Event]:
        """Any message of an agent, be it worth nothing."""
        return [*self._liveness.heard(node, now_s)]

    def closed(self, event: NodeClosed, wall_s: float) -> list[Event]:
        """What the cluster says of a node's host."""
        return self._detectors.closed(event, wall_s)

    def expect_known(self, now_s: float) -> None:
        """After a start: what the journal has should be heard of soon."""
        for node in self._state.nodes.values():
            if node.state not in AWAY:
                self._expect(node.node, now_s)
        for job_id in self._state.jobs:
            self._expect_job(job_id, now_s)

    def refresh(self, changes: Iterable[StateChange], now_s: float) -> list[NodeId]:
        """These changes are part of the state: some things are over, and other limits may hold
        for the nodes that come back."""
        changed: dict[NodeId, None] = {}
        for change in changes:
            if isinstance(change, NodePut):
                changed[change.node.node] = None
            elif isinstance(change, JobPut):
                self._expect_job(change.job.job_id, now_s)
        for node in changed:
            record = self._state.nodes.get(node)
            # It may have been forgotten in the same turn.
            if record is None or record.state in AWAY:
                self._liveness.forget(node)
                self._periods_s.pop(node, None)
                self._clocks.forget(node)
            else:
                self._expect(node, now_s)
        return list(changed)

    def told_period(self, node: NodeId, period_s: float, now_s: float) -> None:
        """The agent was ordered to send heartbeats more or less often from now on."""
        self._periods_s[node] = period_s
        self._expect(node, now_s)

    # Time

    def wake(self, now_s: float, wall_s: float) -> Iterator[Event]:
        """What follows from nothing but the passing of time, one after the other.

        Each event comes only once, so an error in the analysis of one job must not lose those
        before it.
        """
        if self.listening.may_judge(now_s):
            yield from self.judge_silence(now_s)
        self._late_starts(wall_s)
        self._stalled(now_s, wall_s)

    def wake_at(self, now_s: float, wall_s: float) -> float | None:
        """When `wake` is to be called at the latest; None while nothing is waited for."""
        times: list[float] = []
        expiry_s, stall_s = self._liveness.next_expiry_s(), self._stalls.next_s()
        if expiry_s is not None:
            times.append(max(expiry_s, self.listening.judge_after_s))
        if stall_s is not None:
            times.append(stall_s)
        start_s = self._starts.next_s()
        if start_s is not None:
            times.append(now_s + start_s - wall_s)
        return min(times, default=None)

    def silence_due_s(self, node: NodeId) -> float | None:
        """When a node has been silent for too long, or longer than that; None when it is not
        waited for, or no longer."""
        return self._liveness.due_s(node)

    def job_due_s(self, job_id: JobId) -> float | None:
        """When a job has stood still for too long, by the clock of its state; None when that was
        told, or nothing is waited for."""
        job = self._state.jobs.get(job_id)
        if job is None or job.state not in AT_WORK:
            return None
        if job.state is JobState.STARTING:
            is_over = job.deadline_s is None or self._hangs.is_reported(job)
            return None if is_over else _late_at_s(job)
        return self._advances.progress.due_s(job, self._settings.of(job).step_timeout_s)

    def judge_silence(self, now_s: float) -> list[Event]:
        """Nodes that have been silent for too long."""
        return [*self._liveness.expire(now_s)]

    # Judgements of hangs

    @property
    def has_judgements(self) -> bool:
        """Whether `take_judgements` has something to give."""
        return self._hangs.has_judgements

    def take_judgements(self) -> list[HangJudgement]:
        """Jobs that hang: what `judge` of each finds goes to `judged`, be it a while later."""
        return self._hangs.take_judgements()

    def judged(self, judgement: HangJudgement, found: JobStalled | Detected) -> list[Event]:
        """What comes of a judgement: nothing when its job has moved, or was stopped, meanwhile."""
        job = self._state.jobs.get(judgement.job_id)
        is_its = job is not None and job.attempt == judgement.attempt
        if job is not None and is_its and self._still_hangs(job, judgement):
            return [found]
        self._hangs.take_back(judgement)
        if job is not None and job.state is JobState.STARTING and job.deadline_s is not None:
            # Its moment may have come while this was worked out.
            self._starts.put(job.job_id, _late_at_s(job))
        return []

    def _still_hangs(self, job: JobRecord, judgement: HangJudgement) -> bool:
        match judgement.sign:
            case HangSign.STOPPED | HangSign.ALL_STAND:
                return job.state in AT_WORK and self._hangs.still_stands(job, judgement)
            case HangSign.NO_STEP:
                return self._advances.progress.is_stalled(job)
            case HangSign.NO_FIRST_STEP:
                is_awaited = job.state is JobState.STARTING
                return is_awaited and job.deadline_s == judgement.deadline_s
            case _:
                assert_never(judgement.sign)

    def _late_starts(self, wall_s: float) -> None:
        for job_id in self._starts.take(wall_s):
            job = self._state.jobs.get(job_id)
            if job is None or job.state is not JobState.STARTING or job.deadline_s is None:
                continue
            if _late_at_s(job) > wall_s:
                self._starts.put(job_id, _late_at_s(job))
            else:
                self._hangs.start_is_late(job, wall_s)

    def _stalled(self, now_s: float, wall_s: float) -> None:
        """Jobs that have completed no step for longer than they allow."""
        for job_id in self._stalls.take(now_s):
            job = self._state.jobs.get(job_id)
            if job is None or job.state is not JobState.RUNNING:
                continue
            limit_s = self._settings.of(job).step_timeout_s
            stalled_s = self._advances.progress.stalled(job, now_s, limit_s)
            self._expect_step(job)
            if stalled_s is not None:
                self._hangs.stalled(job, stalled_s, wall_s)

    # What is seen of nodes and ranks

    def heard_s(self, node: NodeId) -> float | None:
        """When a node was last heard."""
        return self._liveness.heard_s(node)

    def clock(self, node: NodeId, now_s: float) -> ClockReading | None:
        """How a node's clock differs from the controller's, as far as that is known."""
        return self._clocks.reading(node, now_s)

    def is_late(self, node: NodeId) -> bool:
        """Whether a node is being watched and has been silent for longer than it may be."""
        return self._liveness.is_late(node)

    def summaries(self, job: JobRecord) -> dict[int, agents_pb2.RankSummary]:
        """What was last heard of each rank of the job's present attempt."""
        return self._hangs.summaries(job)

    def some_summaries(self, job: JobRecord, ranks: range) -> list[agents_pb2.RankSummary]:
        """What was last heard of these ranks of the job's present attempt."""
        return self._hangs.some_summaries(job, ranks)

    def wanted_period_s(self, node: NodeId) -> float:
        """How often the agent should send a heartbeat for the job on its node."""
        return self._settings_on(node).heartbeat_period_s

    def absence_limit_s(self, node: NodeId) -> float:
        """How long workers of the node may run without any controller."""
        return self._settings_on(node).controller_absence_limit_s

    # Messages

    def _joined(self, node: NodeId, hello: agents_pb2.Hello, now_s: float) -> list[Event]:
        """An agent opened a session, and will send a heartbeat at the wanted period."""
        self.told_period(node, self.wanted_period_s(node), now_s)
        self._clocks.began(node)
        return [node_joined(hello), *self.heard(node, now_s)]

    def _heartbeat(
        self, node: NodeId, attempts: RanksByAttempt, at_s: float, now_s: float
    ) -> list[Event]:
        """Remembered, and as a rule of no interest to the machine."""
        events: list[Event] = []
        for (job_id, attempt), ranks in attempts.items():
            job = self._state.jobs.get(job_id)
            if job is None or job.state in TERMINAL:
                continue
            for summary in ranks:
                self._hangs.note(summary)
            if job.state in AT_WORK and attempt == job.attempt:
                self._hangs.heard(job, ranks, at_s)
            # Only a running job: how a start went is in the agent's own event, which comes once
            # in each session.
            if job.state is JobState.RUNNING:
                events += self._advances.beat(job, node, ranks, at_s, now_s)
                self._expect_step(job)
        return events

    def _event(self, node: NodeId, event: agents_pb2.AgentEvent, now_s: float) -> list[Event]:
        match event.WhichOneof("kind"):
            case "step_reports":
                return self._detectors.steps(event)
            case "host_sign":
                return self._detectors.host(node, event)
            case "progress":
                job = self._state.jobs.get(JobId(event.job_id))
                events = self._advances.reported(job, node, event, now_s)
                if job is not None:
                    self._expect_step(job)
                return events
            case _:
                return events_of(node, event)

    # What is waited for

    def _expect(self, node: NodeId, now_s: float) -> None:
        self._liveness.expect(node, now_s, self._limits_for(node))

    def _limits_for(self, node: NodeId) -> Limits:
        """Those of the job on a node."""
        settings = self._settings_on(node)
        limits, period_s = settings.limits, settings.heartbeat_period_s
        # An agent that was ordered to be slower must not be late for it.
        slower = max(1.0, self._periods_s.get(node, period_s) / period_s)
        return Limits(
            late_s=slower * limits.late_s,
            lost_s=slower * limits.lost_s,
            silent_s=slower * limits.silent_s,
        )

    def _settings_on(self, node: NodeId) -> JobSettings:
        record = self._state.nodes.get(node)
        if record is None or record.job is None:
            return self._no_job
        return self._settings.of(self._state.jobs[record.job])

    def _expect_job(self, job_id: JobId, now_s: float) -> None:
        """Wait for the end of a start, or for the next step; of an ended job for nothing."""
        job = self._state.jobs.get(job_id)
        # It may have been deleted in the turn in which it ended.
        if job is None or job.state in TERMINAL:
            self._forget(job_id)
        elif job.state is JobState.STARTING and job.deadline_s is not None:
            self._starts.put(job_id, _late_at_s(job))
        elif job.state is JobState.RUNNING:
            self._advances.progress.expect(job, now_s)
            self._expect_step(job)

    def _expect_step(self, job: JobRecord) -> None:
        if job.state is not JobState.RUNNING:
            return
        due_s = self._advances.progress.due_s(job, self._settings.of(job).step_timeout_s)
        if due_s is not None:
            self._stalls.put(job.job_id, due_s)

    def _forget(self, job_id: JobId) -> None:
        """Of a job that has ended nothing is expected any more."""
        self._stalls.forget(job_id)
        self._starts.forget(job_id)
        self._settings.forget(job_id)
        self._advances.forget(job_id)
        self._hangs.forget(job_id)


def _late_at_s(job: JobRecord) -> float:
    """When to ask who holds up a start: early enough for the answer."""
    before_s = BEFORE_DEADLINE_S + BEFORE_DEADLINE_S_PER_RANK * job.plan.world_size
    return (job.deadline_s or 0.0) - before_s
