"""Invariant 16: what the controller says of a job is true, and all that it could say is said.

A worker that is said to have ended has ended, in the attempt that this is held against; a rank
that keeps a start from its first step is named, as far as its node is heard; a host that the
cluster calls broken is noted for the job that trains there; no node is waited for so impatiently
that sending heartbeats at the period it was given makes it late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from controller.core import events as ev
from controller.core.incident_record import Evidence, IncidentRecord
from controller.core.kinds import Cause, EvidenceKind
from controller.core.node_events import WorkerExited
from controller.core.records import JobRecord
from controller.core.states import IncidentState, JobState
from controller.sim.attempt import Phase
from controller.sim.violation import Violation
from outlast.ids import IncidentId, NodeId

if TYPE_CHECKING:
    from controller.core.changes import State
    from controller.sim.world import World

# Of nodes that have been heard for so long it is known what their ranks do.
HEARD_S = 60.0
# Since when a job trains on a host, or the host is called broken.
NOTED_S = 60.0


class IncidentChecks:
    """What is said, held against what is true in the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def put(
        self, event: ev.Event, incident: IncidentRecord, old: IncidentRecord | None, before: State
    ) -> None:
        """An incident is new, or has changed."""
        known = () if old is None else old.evidence
        if incident.evidence is not known:
            signs = [sign for sign in incident.evidence if sign not in known]
            self.grown(event, incident, signs, before)

    def grown(
        self, event: ev.Event, incident: IncidentRecord, signs: Iterable[Evidence], before: State
    ) -> None:
        """These signs are held against a job's present attempt from now on."""
        for sign in signs:
            if sign.kind is EvidenceKind.WORKER_EXIT and isinstance(event, WorkerExited):
                self._has_ended(before.jobs[incident.job], incident.incident, sign)
            elif sign.kind is EvidenceKind.NO_FIRST_STEP:
                self._could_name_nobody(before.jobs[incident.job], incident.incident)

    def _has_ended(self, job: JobRecord, incident: IncidentId, sign: Evidence) -> None:
        training = self._world.trainings.get(job.job_id, job.attempt)
        worker = None if training is None else training.joined.get(sign.rank or 0)
        if worker is None or worker.is_running:
            what = f"says that rank {sign.rank} of {job.job_id}/a{job.attempt} has ended"
            self._fail(f"{incident} {what}, which has not")

    def _could_name_nobody(self, job: JobRecord, incident: IncidentId) -> None:
        """No first step came: that is all that is known only where nobody could tell more."""
        world = self._world
        training = world.trainings.get(job.job_id, job.attempt)
        if training is None or training.phase is not Phase.HUNG or training.culprit is None:
            return
        heard_s = max(map(world.beating_since, training.nodes))
        since_s = max(heard_s, world.controller.started_s, training.frozen_s)
        is_heard = all(map(world.is_beating, training.nodes))
        if is_heard and world.now_s - since_s > HEARD_S:
            what = f"does not say that rank {training.culprit} holds the start up"
            self._fail(f"{incident} of {job.job_id}/a{job.attempt} {what}")

    def host_is_noted(self, job: JobRecord, state: State) -> None:
        """What the cluster says of a host is said of the job that trains there."""
        world = self._world
        if job.state is not JobState.RUNNING:
            return
        for node, since_s in world.cluster.broken.items():
            since_s = max(since_s, world.controller.started_s)
            if node not in job.nodes or world.now_s - since_s < NOTED_S or since_s < job.since_s:
                continue
            if not any(
                incident.state is IncidentState.OPEN
                and incident.cause is Cause.NODE_CONDITION
                and incident.evidence[0].node == node
                for incident in state.incidents_of(job)
            ):
                self._fail(f"{job.job_id} trains on {node}, which is broken, and nothing says so")

    def told_period(self, node: NodeId, period_s: float) -> None:
        """An agent sends a heartbeat so often, with all that was decided up to now."""
        machine = self._world.controller.machine
        job = None if machine is None else machine.state.nodes[node].job
        wanted_s = self._world.heartbeat_s if job is None else self._world.jobs[job].heartbeat_s
        if period_s != wanted_s:
            self._fail(f"{node} is to report every {period_s:g} s, and {job} wants {wanted_s:g}")

    def may_be_silent(self, node: NodeId, period_s: float, allowed_s: float) -> None:
        """A node that was ordered to send a heartbeat in each period may be silent for so long."""
        if allowed_s < period_s:
            what = f"may be silent for {allowed_s:g} s, and is to report every {period_s:g} s"
            self._fail(f"{node} {what}")

    def _fail(self, what: str) -> NoReturn:
        raise Violation(f"invariant 16 at {self._world.hours:.4f} h: {what}")
