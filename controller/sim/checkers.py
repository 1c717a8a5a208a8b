"""The invariants of the controller, checked against what is true in the world.

They see more than the machine does: whether a silent node was silent, whether an
attempt that was given up still trains. The numbers are those of the list of
simulation invariants in the controller's specification.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from controller.core import events as ev
from controller.core.changes import (
    CommandClosed,
    CommandOpened,
    IncidentGrown,
    IncidentPut,
    JobPut,
    NodePut,
    State,
    StateChange,
    grown,
)
from controller.core.effects import Effect, EvictNode, Persist, SendCommand
from controller.core.incident_record import IncidentRecord
from controller.core.machine import Machine
from controller.core.node_events import (
    NodeCordonRequested,
    NodeDrainRequested,
    NodeUncordonRequested,
)
from controller.core.orders import StartWorkers
from controller.core.records import NodeRecord
from controller.core.states import (
    PLACED,
    TERMINAL,
    IncidentState,
    NodeState,
)
from controller.core.verdict import first_failure
from controller.sim.incident_checks import IncidentChecks
from controller.sim.job_checks import wrong_at_end, wrong_in_change
from controller.sim.state_checks import SLACK_S, due_s, inconsistencies, is_same, peers_failed
from controller.sim.user_checks import UserChecks
from controller.sim.violation import Violation
from outlast.ids import JobId, NodeId
from outlast.skipped import is_undone

if TYPE_CHECKING:
    from controller.sim.attempt import Training
    from controller.sim.worker import Worker
    from controller.sim.world import World

BLIND_S = 300.0
BREAKER_WINDOW_S = 600.0
# How long a sign against a node may wait for the breaker, for other nodes' checks and for
# the controller to come back before somebody acts on it.
SIGN_LASTS_S = 3 * 3600.0
# A node that came back so lately may not have had its orders yet.
ORDERS_S = 60.0
# Seed 121: a job remembers as long as it lasts who computed what was finite when done again.
NON_FINITE = "computed NaN"
# Of the edge at one moment.
MAX_LOOKS = 20
# Signs that a blind controller sees in everybody.
SILENCES = ("lost", "silent", "does not answer")
# A worker that fails is no sign against its node; so many there are one.
FAILED = "a worker failed"
MIN_FAILED = 3


class Checkers:
    """All invariants of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Signs against a node: (when, what).
        self._signs: dict[NodeId, deque[tuple[float, str]]] = {}
        self._live: dict[tuple[JobId, int, int], Worker] = {}
        self._quarantines: list[float] = []
        # Partitions of many nodes at once: (when, how long they must be borne, who).
        self._masses: list[tuple[float, float, tuple[NodeId, ...]]] = []
        self._num_spins = 0
        self._num_batches = 0
        # In the journal, when its state was last looked at.
        self._num_changes = -1
        # When the next open order may be overdue.
        self._overdue_s = math.inf
        self._agents_of_starts: dict[str, str] = {}
        self.incidents = IncidentChecks(world)
        self.users = UserChecks(world, self.incidents)

    # What the world reports

    def suspect(self, node: NodeId, sign: str) -> None:
        """Something speaks against the node."""
        self._signs.setdefault(node, deque(maxlen=64)).append((self._world.now_s, sign))

    def silent_for(self, node: NodeId, since_s: float) -> None:
        """A silence of the node has ended, or its listener's life has."""
        silent_s = self._world.now_s - max(since_s, self._world.controller.started_s)
        limits = self._world.limits
        if silent_s >= limits.lost_s - SLACK_S:
            self.suspect(node, "silent" if silent_s >= limits.silent_s - SLACK_S else "lost")

    def crashed(self) -> None:
        """What the controller heard of nodes that are silent counts after its death, too."""
        for node, since_s in self._world.quiet_nodes().items():
            self.silent_for(node, since_s)

    def mass_partition(self, nodes: tuple[NodeId, ...], lasts_s: float) -> None:
        """So many nodes are cut off at once that it must look like our own blindness."""
        self._masses.append((self._world.now_s, min(lasts_s, BLIND_S), nodes))

    def worker_started(self, worker: Worker) -> None:
        """Invariant 1: one live worker per rank and attempt, one attempt per node."""
        key = (worker.job_id, worker.attempt, worker.rank)
        if key in self._live:
            self._fail(1, f"two live workers of {key}")
        self._live[key] = worker
        # Nobody but the node itself can say what runs there, so one that lies is not held to it.
        others = [] if worker.agent.node.hides_workers else worker.agent.running()
        for other in others:
            if (other.job_id, other.attempt) != (worker.job_id, worker.attempt):
                self._fail(
                    1,
                    f"{worker.node} starts {worker.job_id}/a{worker.attempt} beside "
                    f"{other.job_id}/a{other.attempt}",
                )
        for training in self._world.trainings.live():
            if training.job.job_id == worker.job_id and training.attempt < worker.attempt:
                self._older_attempt_trains(training, worker)

    def worker_ended(self, worker: Worker) -> None:
        self._live.pop((worker.job_id, worker.attempt, worker.rank), None)

    def searched(self, nodes: Sequence[NodeId]) -> None:
        """Invariant 1: no process of a job lives where checks run."""
        for node in nodes:
            agent = self._world.nodes[node].agent
            for kept in () if agent is None else agent.all_kept():
                self._fail(1, f"{node} is checked beside {kept.key}, which was kept")

    def resumed(self, training: Training) -> None:
        """Invariant 7: an attempt goes on from what exists, and loses nothing verified."""
        if training.resumed > training.job.high_step + training.job.most_ahead:
            self._fail(7, f"resumed from step {training.resumed}, which nobody completed")
        if training.resumed < training.least_step:
            self._fail(7, f"resumed from {training.resumed} < committed {training.committed_hint}")
        if is_undone(training.skipped, training.resumed):
            self._fail(7, f"resumed from step {training.resumed}, which was rolled back")

    def sealed(self, training: Training, rank: int, steps: Sequence[int], common: int) -> None:
        """Invariant 7: what all ranks know each other to have, each of them has."""
        if common >= 0 and common not in steps:
            self._fail(7, f"rank {rank} of {training.job.job_id} has lost step {common}")

    # What the machine decides

    def ordered(self, index: int, effect: Effect, journalled: State) -> None:
        """Invariant 2: the journal comes before whatever follows from it."""
        match effect:
            case Persist():
                if index != 0:
                    self._fail(2, "Persist is not the first effect of its batch")
                self._note_overdue(journalled)
            case EvictNode(node=node):
                if journalled.nodes[node].state is not NodeState.RETIRED:
                    self._fail(2, f"{node} is evicted without a journalled retirement")
            case SendCommand(command=command, start=start):
                known = journalled.commands.get(command.command_id)
                if known is not command and known != command:
                    self._fail(2, f"{command.command_id} is sent before it is journalled")
                starter = self._agents_of_starts.get(command.command_id)
                if starter not in (None, journalled.nodes[command.node].incarnation):
                    self._fail(1, f"{command.command_id} goes to an agent that it is not for")
                attempt = None if start is None else start.attempt
                if attempt is not None and journalled.attempts.get(attempt.job) != attempt:
                    self._fail(2, f"{command.command_id} is sent before its attempt is journalled")

    def recorded(self, event: ev.Event, change: StateChange, before: State) -> None:
        """Look at a decision in the moment in which it becomes durable."""
        match change:
            case NodePut(node=node):
                self._look_at_node(event, node, before)
                self.users.node_put(event, node, before)
            case JobPut(job=job):
                self.users.job_put(job, before)
                for wrong in wrong_in_change(event, job, before, self._world.jobs[job.job_id]):
                    self._fail(*wrong)
            case IncidentPut(incident=incident):
                old = before.incidents.get(incident.incident)
                if old is not None and old.state is IncidentState.CLOSED:
                    self._fail(10, f"{incident.incident} changes after it was closed")
                self._spared_as_reporter(incident)
                self.incidents.put(event, incident, old, before)
            case IncidentGrown(incident=grown_id):
                old = before.incidents[grown_id]
                if old.state is IncidentState.CLOSED:
                    self._fail(10, f"{grown_id} changes after it was closed")
                self._spared_as_reporter(grown(old, change))
                self.incidents.grown(event, old, change.evidence, before)
            case CommandOpened(command=command):
                if command.command_id in before.commands:
                    self._fail(2, f"{command.command_id} is opened twice")
                self._overdue_s = min(self._overdue_s, due_s(command, before))
                if isinstance(command.command, StartWorkers):
                    agent = before.nodes[command.node].incarnation
                    self._agents_of_starts[command.command_id] = agent
            case CommandClosed(command_id=command_id):
                self._agents_of_starts.pop(command_id, None)

    def _spared_as_reporter(self, incident: IncidentRecord) -> None:
        """Invariant 11: a node whose ranks only lost their peers is never blamed for that."""
        failure = first_failure(incident.evidence)
        if failure is None or not failure.is_cascade:
            return
        found = {node for node, verdict in incident.findings if verdict == "fail"}
        found.update(end for link in incident.bad_links for end in link)
        for node in incident.culprits:
            signs = [item for item in incident.evidence if item.node == node]
            if node not in found and signs and all(item.is_cascade for item in signs):
                self._fail(11, f"{incident.incident} blames {node}, which only lost its peers")

    def appends(self, term: int, newest: int) -> None:
        """Invariant 3: what a deposed leader writes never lands."""
        if term != newest:
            self._fail(3, f"the leader of term {term} wrote in term {newest}")

    def encoded(self, change: StateChange, decoded: StateChange) -> None:
        """Invariant 9: the journal tells what was decided, exactly."""
        if change is not decoded and change != decoded:
            self._fail(9, f"{change} was read back as {decoded}")

    def performed(
        self, event: ev.Event, machine: Machine, journalled: State, wake_s: float | None
    ) -> None:
        """Look at the machine after a batch; it waits until `wake_s`."""
        if isinstance(event, ev.JobStalled):
            self.users.stalled(event)
        self._num_batches += 1
        if self._num_batches % self._world.fidelity.compare_every == 0:
            if not is_same(machine.state, journalled):
                self._fail(9, f"after {type(event).__name__} the state is not the journal's fold")
            num_changes = self._world.controller.journal.num_changes
            # Without a change since, the state is what was looked at before.
            if num_changes != self._num_changes:
                self._num_changes = num_changes
                for invariant, what in inconsistencies(machine.state):
                    self._fail(invariant, what)
        overdue = wake_s is not None and wake_s <= self._world.now_s
        self._num_spins = self._num_spins + 1 if overdue else 0
        if self._num_spins > 20:
            self._fail(10, f"wake_at stays at {wake_s}, which has passed: the timer spins")

    def edge_looks(self, times: int) -> None:
        """The edge looks at what is due, so often at this moment."""
        if times > MAX_LOOKS:
            self._fail(10, "what is due stays due however often the edge looks: its timer spins")

    def restarted(self, folded: State, journalled: State) -> None:
        """Invariant 9: whatever the crash cut short, the journal tells the whole state."""
        if folded != journalled:
            self._fail(9, "the decoded journal folds into another state")
        self._num_spins = 0

    def finished(self, state: State) -> None:
        """Invariants 4 and 10, when all faults are over and all jobs have had time."""
        for job in state.jobs.values():
            if job.state not in TERMINAL:
                self._fail(10, f"{job.job_id} is {job.state} for ever: {job.reason}")
            if not job.reason:
                self._fail(10, f"{job.job_id} is {job.state} without a reason")
            for wrong in wrong_at_end(job, self._world.jobs[job.job_id]):
                self._fail(*wrong)
        for node in state.nodes.values():
            if node.state is NodeState.QUARANTINED:
                self._fail(4, f"{node.node} is QUARANTINED for ever: {node.reason}")
            if node.state in (*PLACED, NodeState.VALIDATING):
                self._fail(4, f"{node.node} is {node.state} for ever: {node.reason}")
        for incident in state.incidents.values():
            if incident.state is not IncidentState.CLOSED:
                self._fail(10, f"{incident.incident} of an ended job is {incident.state}")
        for key, worker in self._live.items():
            if self._world.is_beating(worker.node):
                self._fail(10, f"worker {key} on {worker.node} outlived its job")
        for machine in self._world.nodes.values():
            if machine.memory and self._world.is_beating(machine.name):
                self._fail(10, f"{machine.name} keeps host memory of {', '.join(machine.memory)}")

    # Each change

    def _look_at_node(self, event: ev.Event, node: NodeRecord, before: State) -> None:
        old = before.nodes.get(node.node)
        if old is None:
            return
        persons = isinstance(event, NodeUncordonRequested) and event.node == node.node
        if old.cordoned and not node.cordoned and not persons:
            self._fail(5, f"{node.node}: a cordon vanished on {type(event).__name__}")
        asked = (NodeCordonRequested, NodeDrainRequested)
        if node.cordoned and not old.cordoned and not isinstance(event, asked):
            self._destroys(before, node, "cordoned")
        if node.state is NodeState.QUARANTINED and old.state is not NodeState.QUARANTINED:
            self._destroys(before, node, "quarantined")
            self._spared_while_blind(node)
            self._quarantined(node, before)
        elif node.state is NodeState.RETIRED and old.state is not NodeState.RETIRED:
            self._destroys(before, node, "retired")

    def _destroys(self, before: State, node: NodeRecord, what: str) -> None:
        """Invariant 2: two independent signs, or a long silence."""
        now_s = self._world.now_s
        signs = [
            sign
            for at_s, sign in self._signs.get(node.node, ())
            if (at_s > now_s - SIGN_LASTS_S or sign == NON_FINITE) and sign != "lost"
        ]
        since_s = self._world.quiet_since(node.node)
        lost = any(sign == "lost" for _, sign in self._signs.get(node.node, ()))
        if since_s is not None:
            silent_s = now_s - max(since_s, self._world.controller.started_s)
            if silent_s >= self._world.limits.silent_s - SLACK_S:
                return
            lost = lost or silent_s >= self._world.limits.lost_s - SLACK_S
        if signs.count(FAILED) < MIN_FAILED:
            signs = [sign for sign in signs if sign != FAILED]
        if not signs and not (lost and peers_failed(before, node)):
            self._fail(2, f"{node.node} is {what} without a cause ({node.reason})")

    def _spared_while_blind(self, node: NodeRecord) -> None:
        """Many silent nodes at once are the controller's own blindness for a while."""
        now_s = self._world.now_s
        for number, (at_s, lasts_s, nodes) in enumerate(self._masses):
            recent = number and at_s - self._masses[number - 1][0] < 3 * BLIND_S
            if recent or node.node not in nodes or not at_s < now_s < at_s + lasts_s:
                continue
            since_s = self._world.quiet_since(node.node)
            if since_s is not None and since_s < at_s:
                # It was silent before the others were.
                continue
            others = [
                sign
                for sign_s, sign in self._signs.get(node.node, ())
                if sign_s > now_s - SIGN_LASTS_S and sign not in (*SILENCES, FAILED)
            ]
            if not others:
                self._fail(2, f"{node.node} is quarantined {now_s - at_s:.0f} s into a blindness")

    def _quarantined(self, node: NodeRecord, before: State) -> None:
        """Invariants 4 and 8: a session, and not too many of them in a window."""
        now_s = self._world.now_s
        if node.quarantines_s[-1:] != (now_s,) or node.timer_s is None:
            self._fail(4, f"{node.node} is quarantined without a session that ends")
        self._quarantines = [at for at in self._quarantines if at > now_s - BREAKER_WINDOW_S]
        self._quarantines.append(now_s)
        fleet = [n for n in before.nodes.values() if n.state is not NodeState.RETIRED]
        limit = max(1, int(0.1 * len(fleet)))
        if len(self._quarantines) > limit:
            self._fail(8, f"{len(self._quarantines)} quarantines in a window; {limit} are allowed")

    def _older_attempt_trains(self, training: Training, worker: Worker) -> None:
        """Invariant 1: no two attempts train, but for one that nobody can reach."""
        for node in dict.fromkeys(training.rank_nodes):
            machine = self._world.controller.machine
            if machine is None or not self._world.is_beating(node):
                continue
            if self._world.nodes[node].hides_workers:
                continue
            if self._world.now_s - self._world.beating_since(node) < ORDERS_S:
                continue
            self._fail(
                1,
                f"{worker.job_id}/a{worker.attempt} starts while a{training.attempt} trains "
                f"within reach on {node}",
            )

    def _note_overdue(self, journalled: State) -> None:
        """Orders not carried out in time speak against a node."""
        now_s = self._world.now_s
        if now_s < self._overdue_s:
            return
        self._overdue_s = math.inf
        for command in journalled.commands.values():
            again_s = due_s(command, journalled)
            if now_s >= again_s:
                self.suspect(command.node, "does not answer")
                again_s = now_s + SLACK_S
            self._overdue_s = min(self._overdue_s, again_s)

    def _fail(self, invariant: int, what: str) -> NoReturn:
        raise Violation(f"invariant {invariant} at {self._world.hours:.4f} h: {what}")
