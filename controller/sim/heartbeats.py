"""What agents' heartbeats bring to the edge, without a message every two seconds from each.

The edge is the production one, and so are the messages. Left out are only those of which it
would make nothing, and its timers that would find nothing:

- A node that beats is heard every period, which is shorter than any limit on silence. So its
  silence never comes to anything, and it is enough that it is heard when it begins to beat,
  when it stops, and just before the edge looks at it.
- A job that trains on nodes all of which beat completes a step every few seconds, which is
  shorter than any limit on steps. So it is enough that its ranks are heard when it stops to
  train or one of its nodes to beat, just before the edge looks at the job, and after the steps
  that are events of the machine.

Timers therefore ring for silent nodes, for jobs that do not train and for starts. What the edge
finds then is what it would have found, but for a heartbeat's period and the length of a step by
which a silence or a stall may seem to have begun later.

What does not belong here: deciding who is late or hangs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from controller.core.changes import JobPut, NodePut, StateChange
from controller.core.edge.edge import Edge
from controller.core.states import AT_WORK, JobState
from controller.sim.attempt import Phase, Training
from controller.sim.ranks import heartbeat_of
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2

if TYPE_CHECKING:
    from controller.sim.controller import Controller
    from controller.sim.world import World

# How often agents look at their ranks (`controller.agent.observe.stall_watch`).
LOOK_S = 0.2
# Of the heartbeats of an attempt that hangs, those so far apart bring it to any controller.
AGAIN_S = 60.0


class Heartbeats:
    """Those of all nodes, and the timer of the edge."""

    def __init__(self, world: World, controller: Controller) -> None:
        self._world = world
        self._controller = controller
        # When the timer rings; None while it is not set.
        self._ring_s: float | None = None
        # When it rang last, and how often at that moment.
        self._rang_s, self._num_rings = 0.0, 0

    def begin(self) -> None:
        """The controller has started, and waits for all that it knows of."""
        self._ring_s = None
        self._set_timer()

    def beats(self, node: NodeId) -> None:
        """The node's heartbeats arrive again."""
        self._controller.take(node, self._plain())
        for training in self._world.trainings.live():
            if node not in training.members:
                continue
            if self._world.fidelity.progress_at_once:
                # A message held up by the cut would say it now.
                self._controller.take_progress(training, node)
            self._controller.take(node, heartbeat_of(training, node, self._world.now_s))

    def quiet(self, node: NodeId) -> None:
        """The node's last heartbeat for a while: a moment ago all was well."""
        self._controller.take(node, self._plain())
        if self._controller.edge is None:
            return
        self._expect_node(node)
        for training in self._world.trainings.live():
            # Of several nodes that go quiet together the first one says it for all.
            is_first = training.members.isdisjoint(self._world.quiet_nodes().keys() - {node})
            if node in training.members and is_first:
                self._hear_last(training)
                self._expect_job(training.job.job_id)

    def _plain(self) -> agents_pb2.AgentMessage:
        """Of a node of which nothing else is to be said."""
        return agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(at_s=self._world.now_s))

    def stands(self, training: Training) -> None:
        """An attempt trains no more, and the next heartbeats say where its ranks stand."""
        self._world.timeline.after(0.0, self._heard_to_stand, training)

    def goes_on(self, training: Training) -> None:
        """An attempt has completed a step: of each node the next heartbeat says so."""
        self._world.timeline.after(training.job.heartbeat_s, self._heard_to_go_on, training)

    def _heard_to_go_on(self, training: Training) -> None:
        machine = self._controller.machine
        job = None if machine is None else machine.state.jobs.get(training.job.job_id)
        if job is None or job.attempt != training.attempt or not training.is_training:
            return
        if job.state is JobState.STARTING:
            # Agents' own reports of the first step may be held up; before these it counts nothing.
            self.goes_on(training)
        else:
            self.hear(training)

    def hangs(self, training: Training) -> None:
        """An attempt hangs, and agents have learned for how long a rank may stand."""
        self._world.timeline.after(training.stall_limit_s + LOOK_S, self._say_again, training)

    def _say_again(self, training: Training) -> None:
        """Every heartbeat says that a rank stands; the first one may meet no controller."""
        if training.phase is Phase.HUNG:
            self.hear(training)
            self._world.timeline.after(AGAIN_S, self._say_again, training)

    def refreshed(self, changes: Iterable[StateChange]) -> None:
        """These were decided: something else may be waited for."""
        quiet = self._world.quiet_nodes()
        for change in changes:
            if isinstance(change, NodePut) and change.node.node in quiet:
                self._expect_node(change.node.node)
            elif isinstance(change, JobPut) and change.job.state in AT_WORK:
                self._expect_job(change.job.job_id)

    def hear(self, training: Training) -> None:
        """A heartbeat of each node of an attempt that beats."""
        now_s = self._world.now_s
        for node in training.nodes:
            if self._world.is_beating(node):
                message = heartbeat_of(training, node, now_s)
                if not self._controller.take(node, message):
                    return

    def _hear_last(self, training: Training) -> None:
        """What all nodes said a moment ago, before something ended: a rank, a node, a line."""
        now_s = self._world.now_s
        for node in training.nodes:
            if self._world.quiet_since(node) == now_s or self._world.is_beating(node):
                message = heartbeat_of(training, node, now_s, with_ended=True)
                if not self._controller.take(node, message):
                    return

    def _heard_to_stand(self, training: Training) -> None:
        if self._controller.edge is not None:
            self._hear_last(training)
            self._expect_job(training.job.job_id)

    # The timer

    def _expect_node(self, node: NodeId) -> None:
        edge = self._controller.edge
        due_s = None if edge is None else edge.silence_due_s(node)
        if edge is not None and due_s is not None:
            self._ring_at(max(due_s, self._wakes_s(edge)))

    def _expect_job(self, job_id: JobId) -> None:
        edge = self._controller.edge
        due_s = None if edge is None or self._is_well(job_id) else edge.job_due_s(job_id)
        if edge is not None and due_s is not None:
            self._ring_at(max(due_s, self._wakes_s(edge)))

    def _is_well(self, job_id: JobId) -> bool:
        """Whether every heartbeat would say that a job has come further."""
        machine = self._controller.machine
        job = None if machine is None else machine.state.jobs.get(job_id)
        if job is None or job.state is not JobState.RUNNING:
            return False
        training = self._world.trainings.get(job_id, job.attempt)
        return training is not None and self._world.all_well(training)

    def _ring_at(self, due_s: float) -> None:
        if math.isinf(due_s):
            return
        # What is due at about the same time is looked at together.
        at_s = math.ceil(10.0 * due_s + 0.01) / 10.0
        if self._ring_s is None or at_s < self._ring_s:
            self._ring_s = at_s
            self._world.timeline.at(at_s, self._ring, at_s)

    def _set_timer(self) -> None:
        for node in self._world.quiet_nodes():
            self._expect_node(node)
        machine = self._controller.machine
        for job_id in () if machine is None else list(machine.state.jobs):
            self._expect_job(job_id)

    def _ring(self, at_s: float) -> None:
        """Bring what the edge would have heard, and let it look."""
        edge, machine = self._controller.edge, self._controller.machine
        if at_s != self._ring_s or edge is None or machine is None:
            return
        self._ring_s = None
        world, now_s = self._world, self._world.now_s
        self._num_rings = self._num_rings + 1 if now_s == self._rang_s else 1
        self._rang_s = now_s
        world.checkers.edge_looks(self._num_rings)
        # All of them say the same.
        plain = self._plain()
        for node in list(machine.state.nodes):
            due_s = edge.silence_due_s(node)
            if due_s is not None and due_s <= now_s and world.is_beating(node):
                self._controller.take(node, plain)
        for job in list(machine.state.jobs.values()):
            due_s = edge.job_due_s(job.job_id)
            training = world.trainings.get(job.job_id, job.attempt)
            if due_s is not None and due_s <= now_s and training is not None:
                self.hear(training)
        if self._controller.edge is edge:
            if self._wakes_s(edge) <= now_s:
                self._controller.wake()
            self._set_timer()

    def _wakes_s(self, edge: Edge) -> float:
        """When the edge wants to look: nothing that is due is found before."""
        wake_s = edge.wake_at(self._world.now_s, self._world.now_s)
        return math.inf if wake_s is None else wake_s
