"""The production machine in a controller that may die between any two effects.

Everything that it knows after a restart comes from the journal, which holds
encoded facts only. The edge does what the service does: turns messages into
events, silence into `NodeLate` and friends, progress into `JobAdvanced`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from controller.core import events as ev
from controller.core.attempt_record import AttemptRecord
from controller.core.context import Settings
from controller.core.edge.liveness import LivenessTable
from controller.core.edge.progress import ProgressTable
from controller.core.effects import (
    Alert,
    Effect,
    EndSearch,
    EvictNode,
    Persist,
    ProvisionNodes,
    SearchFaults,
    SendCommand,
)
from controller.core.facts import Fact, NodePut
from controller.core.machine import Machine
from controller.core.records import CommandRecord
from controller.core.states import JobState, NodeState
from controller.sim.agent import AgentEvent, ProgressMade
from controller.sim.journal import DeposedError, Journal
from controller.sim.network import Session
from controller.sim.training import Phase, Training
from outlast.ids import JobId, NodeId

if TYPE_CHECKING:
    from controller.sim.world import World


class _Crash(Exception):
    """The controller dies here."""


class Controller:
    """One controller, through all its lives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.journal = Journal(codec_every=world.fidelity.codec_every)
        self.machine: Machine | None = None
        self.term = 0
        self.started_s = 0.0
        self.sessions: dict[NodeId, Session] = {}
        # Effects until the next crash; None when none is planned.
        self.crash_countdown: int | None = None
        self.crash_down_s = 0.0
        self._liveness = LivenessTable()
        self._progress = ProgressTable()
        self._timer_s: float | None = None
        self._ended_searches: dict[str, None] = {}
        # When silence is looked at next.
        self._looks: dict[float, None] = {}

    # Life and death

    def start(self) -> None:
        """Fold the journal and listen again."""
        if self.machine is not None:
            return
        world = self._world
        self.term = self.journal.take_term()
        self.started_s = world.now_s
        state = self.journal.fold()
        world.checkers.restarted(state, self.journal.folded)
        self.machine = Machine(state, Settings(brings_nodes=world.cluster.brings_nodes))
        self._liveness = LivenessTable()
        self._progress = ProgressTable()
        self._timer_s = None
        self._looks = {}
        for node in state.nodes.values():
            if node.state is not NodeState.RETIRED:
                self._liveness.expect(node.node, world.now_s, world.limits)
        world.trace("control", f"term {self.term}", f"started, {len(self.journal.facts)} facts")
        self.handle(ev.ControllerStarted(term=self.term))
        self._watch_silence(world.now_s)
        world.cluster.tell_all()
        world.timeline.after(world.pace.hang_timeout_s / 2, self._check_progress, self.term)
        world.controller_is_up()

    def crash(self) -> None:
        """Forget everything but the journal."""
        if self.machine is None:
            return
        self._world.trace("control", f"term {self.term}", "crashed")
        self._world.checkers.crashed()
        self.machine = None
        self.crash_countdown = None
        sessions, self.sessions = list(self.sessions.values()), {}
        for session in sessions:
            session.open_at_controller = False
            self._world.network.drop(session, at_agent=True, at_controller=False)
        self._world.timeline.after(self.crash_down_s, self.start)

    def depose(self) -> None:
        """Another controller takes over; this one does not know, and goes on a while later."""
        if self.machine is None:
            return
        old, term = self.machine, self.term
        self.crash_down_s = self._world.random.uniform(15.0, 20.0)
        self.crash()
        delay_s = self._world.random.uniform(25.0, 300.0)
        self._world.timeline.after(delay_s, self._act_as_deposed, old, term)

    def _act_as_deposed(self, old: Machine, term: int) -> None:
        """It takes every node for lost, and its journal must not take that in."""
        for node in list(old.state.nodes):
            event = ev.NodeSilent(node=node, silent_s=3600.0)
            for effect in old.handle(event, self._world.now_s):
                if isinstance(effect, Persist):
                    try:
                        for fact in effect.facts:
                            self._append(event, fact, term)
                    except DeposedError:
                        return

    # The machine

    def handle(self, event: ev.Event) -> bool:
        """Give the machine an event; False when there is no controller (any more)."""
        machine = self.machine
        if machine is None:
            return False
        world = self._world
        try:
            effects = machine.handle(event, world.now_s)
            for place, effect in enumerate(effects):
                self._count_down()
                world.checkers.ordered(place, effect, self.journal.folded)
                self._perform(event, effect)
                if self.machine is not machine:
                    # Seed 783: it died of an event that this effect brought about.
                    return False
            self._count_down()
            world.checkers.performed(event, machine, self.journal.folded)
        except _Crash:
            self.crash()
            return False
        self._set_timer()
        return True

    def _count_down(self) -> None:
        if self.crash_countdown is None:
            return
        self.crash_countdown -= 1
        if self.crash_countdown < 0:
            raise _Crash

    def _perform(self, event: ev.Event, effect: Effect) -> None:
        world = self._world
        match effect:
            case Persist(facts=facts):
                for fact in facts:
                    self._append(event, fact, self.term)
            case SendCommand(command=command, attempt=attempt):
                self._send(command, attempt)
            case ProvisionNodes(count=count, reason=reason):
                world.trace("provide", f"{count} nodes", reason)
                world.cluster.provision(count)
            case EvictNode(node=node, reason=reason):
                world.trace("evict", node, reason)
                self._liveness.forget(node)
                world.cluster.evict(node)
            case SearchFaults():
                self._search(effect)
            case EndSearch(search=search):
                self._ended_searches[search] = None
            case Alert(summary=summary):
                world.trace("alert", "", summary)

    def _append(self, event: ev.Event, fact: Fact, term: int) -> None:
        checkers = self._world.checkers
        self.journal.check(term)
        checkers.appends(term, self.term)
        decoded = self.journal.decoded(fact)
        checkers.encoded(fact, decoded)
        checkers.recorded(event, fact, self.journal.folded)
        self.journal.append(fact, decoded)
        self._world.tracer.fact(fact)
        if isinstance(fact, NodePut):
            self._world.cluster.decided(fact.node)

    def _send(self, command: CommandRecord, attempt: AttemptRecord | None) -> None:
        session = self.sessions.get(command.node)
        agent = self._world.nodes[command.node].agent
        if session is not None and agent is not None:
            self._world.network.send(session, agent.receive, command, attempt, up=False)

    def _search(self, effect: SearchFaults) -> None:
        """The checks of a search: they take a while, and die with the controller."""
        world = self._world
        world.trace("search", effect.search, ", ".join(effect.nodes))
        slowest_s = max(world.nodes[node].check_delay_s for node in effect.nodes)
        took_s = min(world.pace.search_s() + slowest_s, effect.timeout_s)
        world.timeline.after(took_s, self._searched, self.term, effect)

    def _searched(self, term: int, effect: SearchFaults) -> None:
        if self.machine is None or term != self.term or effect.search in self._ended_searches:
            return
        found = tuple(self._found(node, effect) for node in (*effect.nodes, *effect.spares))
        bad = [pair for pair in self._world.bad_links if set(pair) <= set(effect.nodes)]
        for node in (end for pair in bad for end in pair):
            self._world.checkers.suspect(node, "end of a bad link")
        self.handle(
            ev.FaultsSearched(
                search=effect.search, job_id=effect.job, nodes=found, links=tuple(bad)
            )
        )

    def _found(self, node: NodeId, effect: SearchFaults) -> ev.NodeFound:
        """What a search says of a node: sick, silent, gone, or well."""
        world = self._world
        machine = world.nodes[node]
        if machine.agent is None or node not in self.sessions:
            return ev.NodeFound(node=node, verdict="error", detail="its session ended")
        if machine.passes_checks:
            return ev.NodeFound(node=node, verdict="pass", detail="", figure=1.0)
        if machine.is_corrupt:
            world.checkers.suspect(node, "checks failed")
            return ev.NodeFound(node=node, verdict="fail", detail="wrong bits", is_corrupt=True)
        if machine.sickness or machine.check_delay_s >= effect.timeout_s:
            world.checkers.suspect(node, "checks failed")
            detail = machine.sickness or "its checks did not end in time"
            return ev.NodeFound(node=node, verdict="fail", detail=detail, figure=0.4)
        return ev.NodeFound(node=node, verdict="pass", detail="", figure=1.0)

    def _set_timer(self) -> None:
        assert self.machine is not None
        wake_s = self.machine.wake_at()
        if wake_s is not None and (self._timer_s is None or wake_s < self._timer_s):
            self._timer_s = wake_s
            delay_s = self._world.random.uniform(0.0, 0.05)
            self._world.timeline.at(wake_s + delay_s, self._timer_rings, self.term, wake_s)

    def _timer_rings(self, term: int, wake_s: float) -> None:
        if self.machine is None or term != self.term or wake_s != self._timer_s:
            return
        self._timer_s = None
        self.handle(ev.TimePassed())

    # Sessions

    def accept(self, session: Session, hello: ev.NodeJoined) -> None:
        """An agent is here; its older session, if any, is replaced."""
        if self.machine is None or session.broken:
            self._world.network.drop(session, at_agent=True, at_controller=False)
            return
        node = hello.node
        self.sessions[node] = session
        session.open_at_controller = True
        self._liveness.expect(node, self._world.now_s, self._world.limits)
        joined = self.handle(hello)
        self._world.pulse(node)
        if not joined:
            return
        if self._world.nodes[node].agent is not None:
            agent = self._world.nodes[node].agent
            assert agent is not None
            self._world.network.send(session, agent.welcomed, session, up=False)

    def lost(self, session: Session) -> None:
        """The session ended; that matters unless a newer one took its place."""
        if self.sessions.get(session.node) is session:
            del self.sessions[session.node]
            self.handle(ev.NodeDisconnected(node=session.node))

    def receive(self, session: Session, incarnation: str, seq: int, event: AgentEvent) -> None:
        """An event of an agent: handled and durable before it is acknowledged."""
        if self.machine is None or self.sessions.get(session.node) is not session:
            return
        if isinstance(event, ProgressMade):
            if not self._progressed(event):
                return
        elif not self.handle(event):
            return
        agent = self._world.nodes[session.node].agent
        if agent is None or agent.incarnation != incarnation:
            return
        if self._world.fidelity.idle_messages:
            self._world.network.send(session, agent.acknowledged, seq, up=False)
        else:
            agent.acknowledged(seq)

    # Silence

    def hear(self, node: NodeId) -> None:
        """A heartbeat of a node that may have been silent."""
        for event in self._liveness.heard(node, self._world.now_s):
            self.handle(event)

    def quiet(self, node: NodeId) -> None:
        """The node's last heartbeat for a while."""
        if self.machine is not None:
            self.hear(node)
            self._watch_silence(self._world.now_s)

    def _watch_silence(self, since_s: float) -> None:
        limits = self._world.limits
        for limit_s in (limits.late_s, limits.lost_s, limits.silent_s):
            # Nodes that fall silent together are looked at together.
            at_s = math.ceil(10.0 * (since_s + limit_s) + 0.01) / 10.0
            if at_s not in self._looks:
                self._looks[at_s] = None
                self._world.timeline.at(at_s, self._expire, self.term, at_s)

    def _expire(self, term: int, at_s: float) -> None:
        self._looks.pop(at_s, None)
        if self.machine is None or term != self.term:
            return
        for node in list(self.machine.state.nodes):
            if self._world.is_beating(node):
                self.hear(node)
        for event in self._liveness.expire(self._world.now_s):
            self.handle(event)

    # Progress

    def _progressed(self, made: ProgressMade) -> bool:
        assert self.machine is not None
        job = self.machine.state.jobs.get(made.job_id)
        if job is None:
            return True
        events = self._progress.made(
            job,
            made.node,
            attempt=made.attempt,
            completed_step=made.completed_step,
            resumed_step=made.resumed_step,
            at_s=made.at_s,
            now_s=made.at_s,
        )
        return all(self.handle(event) for event in events)

    def _check_progress(self, term: int) -> None:
        """Look at heartbeats for jobs that have stopped advancing."""
        if self.machine is None or term != self.term:
            return
        for job_id in list(self.machine.state.jobs):
            self._check_job(job_id)
        self._world.timeline.after(self._world.pace.hang_timeout_s / 2, self._check_progress, term)

    def _check_job(self, job_id: JobId) -> None:
        world = self._world
        if self.machine is None or self.machine.state.jobs[job_id].state is not JobState.RUNNING:
            return
        job = self.machine.state.jobs[job_id]
        training = world.trainings.get(job_id, job.attempt)
        if training is not None and world.all_well(training):
            # Healthy heartbeats cost nothing: they would only say that it goes on.
            self._progress.forget(job_id)
            return
        if training is not None and not self.take_heartbeats(training):
            return
        job = self.machine.state.jobs[job_id]
        stalled_s = self._progress.stalled(job, world.now_s, world.pace.hang_timeout_s)
        if stalled_s is not None:
            culprit = None if training is None else training.culprit
            self.handle(
                ev.JobStalled(
                    job_id=job_id,
                    attempt=job.attempt,
                    stalled_s=stalled_s,
                    culprit_ranks=() if culprit is None else (culprit,),
                    detail="hung in an all-reduce",
                )
            )

    def hang_found(self, training: Training) -> None:
        """Somebody noticed that an attempt stands still, if it still does."""
        job = None if self.machine is None else self.machine.state.jobs.get(training.job.job_id)
        if job is not None and training.phase is Phase.HUNG:
            self.handle(
                ev.JobStalled(
                    job_id=job.job_id,
                    attempt=training.attempt,
                    stalled_s=0.0,
                    culprit_ranks=(),
                    detail="hung in an all-reduce",
                )
            )

    def take_heartbeats(self, training: Training) -> bool:
        """What the newest heartbeats said; False when the controller is dead or died of it."""
        world = self._world
        if self.machine is None:
            return False
        job_id, attempt, resumed = training.job.job_id, training.attempt, training.resumed
        job = self.machine.state.jobs[job_id]
        now_s, completed_now = world.now_s, training.completed(world.now_s)
        for node in training.nodes:
            silent_since_s = world.quiet_since(node)
            at_s = now_s if silent_since_s is None else silent_since_s
            completed = completed_now if silent_since_s is None else training.completed(at_s)
            if completed <= resumed or at_s < self.started_s:
                continue
            for event in self._progress.made(
                job,
                node,
                attempt=attempt,
                completed_step=completed,
                resumed_step=resumed,
                at_s=at_s,
                now_s=at_s,
            ):
                if not self.handle(event):
                    return False
                job = self.machine.state.jobs[job_id]
        return True
