"""Invariants 10 and 13 to 15: what users count on, and what no other part would miss.

10. A job's limit is acted on when its time has come.
13. A job that trains no more is noticed within its own limits, or soon where agents can say
    why, and one that trains is never said to hang.
14. A node that was excluded takes part again after clean checks only, or on a person's word.
15. An agent that is stopped in order costs a job no retry.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

from controller.core import events as ev
from controller.core.kinds import EvidenceKind
from controller.core.node_events import NodeUncordonRequested
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import JobState, NodeState
from controller.core.verdict import is_follower
from controller.sim.attempt import Phase, Training
from controller.sim.incident_checks import IncidentChecks
from controller.sim.violation import Violation
from outlast.ids import NodeId

if TYPE_CHECKING:
    from controller.core.changes import State
    from controller.sim.world import World

LOOK_S = 120.0
# What a controller that has just started, or distrusts its own network, has to find out first.
NOTICE_SLACK_S = 600.0
# A stall may seem to have begun earlier by a step and a heartbeat.
STALL_SLACK_S = 30.0
LEAST_PASSES = 2
# What agents have to say of their workers has arrived and was decided on, with what waits for a
# timer: ranks that lost a node in silence fail within a minute.
SOON_S = 180.0
# Agents say that ranks stand in every heartbeat; in a simulation, once a minute.
SAID_S = 90.0


class UserChecks:
    """What is promised to users, held against what is true in the world."""

    def __init__(self, world: World, incidents: IncidentChecks) -> None:
        self._world = world
        self._incidents = incidents
        # Suites in a row that a node has passed since it last failed one or was excluded.
        self._passes: dict[NodeId, int] = {}
        world.timeline.after(LOOK_S, self._look)

    def checked(self, node: NodeId, *, passed: bool) -> None:
        """A node has run a suite to its end."""
        self._passes[node] = self._passes.get(node, 0) + 1 if passed else 0

    # Invariant 13

    def stalled(self, event: ev.JobStalled) -> None:
        """The controller learns that a job hangs: nothing of what it trained got through."""
        world, now_s = self._world, self._world.now_s
        training = world.trainings.get(event.job_id, event.attempt)
        if training is None or not training.is_training:
            return
        # Nobody can know yet.
        if now_s <= training.said_to_go_on_s:
            return
        since_s = now_s - event.stalled_s + STALL_SLACK_S + training.step_s
        heard_s = max(map(world.beating_since, training.nodes))
        is_heard = all(map(world.is_beating, training.nodes))
        begun_s = max(heard_s, world.controller.started_s, training.reaches_s(training.resumed + 1))
        if is_heard and begun_s < since_s:
            self._fail(13, f"{event.job_id}/a{event.attempt} trains and is said to hang")

    def _look(self) -> None:
        self._world.timeline.after(LOOK_S, self._look)
        machine = self._world.controller.machine
        if machine is None:
            return
        for job in machine.state.live_jobs():
            self._is_decided(job)
            self._incidents.host_is_noted(job, machine.state)
            training = self._world.trainings.get(job.job_id, job.attempt)
            if training is not None:
                self._is_noticed(job, training)

    def _is_decided(self, job: JobRecord) -> None:
        """What waits for a moment does so no longer once it has come."""
        if job.deadline_s is None:
            return
        late_s = self._world.now_s - max(job.deadline_s, self._world.controller.started_s)
        if late_s > SOON_S:
            self._fail(10, f"{job.job_id} is {job.state} {late_s:.0f} s after its limit")

    def _is_noticed(self, job: JobRecord, training: Training) -> None:
        """A job is not called RUNNING while nothing has run for long."""
        world = self._world
        if job.state is not JobState.RUNNING or training.phase not in (Phase.HUNG, Phase.BROKEN):
            return
        since_s = max(training.frozen_s, world.controller.started_s, job.since_s)
        stood_s = world.now_s - since_s
        heard_s = world.now_s - max(since_s, *map(world.beating_since, training.nodes))
        is_late = stood_s > world.pace.hang_timeout_s + NOTICE_SLACK_S
        if is_late or heard_s > self._said_within_s(training):
            self._fail(13, f"{job.job_id}/a{job.attempt} is RUNNING and has stood {stood_s:.0f} s")

    def _said_within_s(self, training: Training) -> float:
        """How long it takes agents to say that the ranks of an attempt have ended, or stand."""
        nodes = [self._world.nodes[node] for node in training.nodes]
        if any(node.is_stuck or node.hides_workers for node in nodes):
            return math.inf
        if not all(map(self._world.is_beating, training.nodes)):
            return math.inf
        if training.phase is Phase.BROKEN:
            return SOON_S
        return training.stall_limit_s + SAID_S if training.stall_limit_s else math.inf

    # Invariants 14 and 15

    def node_put(self, event: ev.Event, node: NodeRecord, before: State) -> None:
        """What is decided about a node."""
        old = before.nodes.get(node.node)
        if old is None or old.state is node.state:
            return
        if node.state in (NodeState.QUARANTINED, NodeState.RETIRED):
            self._passes[node.node] = 0
        elif old.state is NodeState.VALIDATING and node.state is NodeState.READY:
            is_persons = isinstance(event, NodeUncordonRequested)
            passes = self._passes.get(node.node, 0)
            if passes < LEAST_PASSES and not is_persons:
                self._fail(14, f"{node.node} is {node.state} again after {passes} clean checks")

    def job_put(self, job: JobRecord, before: State) -> None:
        """What is decided about a job."""
        old = before.jobs.get(job.job_id)
        incident = None if old is None or old.incident is None else before.incidents[old.incident]
        if old is None or incident is None or job.retry_left >= old.retry_left:
            return
        kinds = {item.kind for item in incident.evidence if not is_follower(item)}
        if kinds == {EvidenceKind.NODE_LEFT}:
            self._fail(15, f"{job.job_id}: a planned stop costs a retry ({incident.incident})")

    def _fail(self, invariant: int, what: str) -> NoReturn:
        raise Violation(f"invariant {invariant} at {self._world.hours:.4f} h: {what}")
