"""The production machine in a controller that may die between any two effects.

Everything that it knows after a restart comes from the journal, which holds
encoded facts only. Who is late, who has advanced and which job hangs is decided by the
production edge; `heartbeats` brings it what agents would say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from controller.core import events as ev
from controller.core.attempt_record import AttemptRecord
from controller.core.context import Settings
from controller.core.edge.edge import Edge
from controller.core.edge.settings import JobSettings
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
from controller.core.records import CommandRecord, JobRecord
from controller.sim.agent import AgentEvent, ProgressMade
from controller.sim.attempt import Training
from controller.sim.heartbeats import Heartbeats
from controller.sim.journal import DeposedError, Journal
from controller.sim.network import Session
from outlast.detectors import DetectorsSpec
from outlast.ids import NodeId
from outlast.layout import Layout
from outlast.v1 import agents_pb2

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
        self.edge: Edge | None = None
        self.heartbeats = Heartbeats(world, self)
        self._timer_s: float | None = None
        self._ended_searches: dict[str, None] = {}

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
        no_job = JobSettings(layout=Layout(tp=1, pp=1, dp=1), limits=world.limits)
        self.edge = Edge(state, self._settings_of, no_job=no_job)
        self.edge.expect_known(world.now_s)
        self._timer_s = None
        world.trace("control", f"term {self.term}", f"started, {len(self.journal.facts)} facts")
        self.handle(ev.ControllerStarted(term=self.term))
        self.heartbeats.begin()
        world.cluster.tell_all()
        world.controller_is_up()

    def crash(self) -> None:
        """Forget everything but the journal."""
        if self.machine is None:
            return
        self._world.trace("control", f"term {self.term}", "crashed")
        self._world.checkers.crashed()
        self.machine = self.edge = None
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
                        self._append(event, effect.facts, term)
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
        facts = [each for effect in effects if isinstance(effect, Persist) for each in effect.facts]
        if facts and self.edge is not None:
            self.edge.refresh(facts, world.now_s)
            self.heartbeats.refreshed(facts)
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
                self._append(event, facts, self.term)
            case SendCommand(command=command, attempt=attempt):
                self._send(command, attempt)
            case ProvisionNodes(count=count, reason=reason):
                world.trace("provide", f"{count} nodes", reason)
                world.cluster.provision(count)
            case EvictNode(node=node, reason=reason):
                world.trace("evict", node, reason)
                world.cluster.evict(node)
            case SearchFaults():
                self._search(effect)
            case EndSearch(search=search):
                self._ended_searches[search] = None
            case Alert(summary=summary):
                world.trace("alert", "", summary)

    def _append(self, event: ev.Event, facts: Sequence[Fact], term: int) -> None:
        journal, checkers = self.journal, self._world.checkers
        journal.check(term)
        checkers.appends(term, self.term)
        for written, read in journal.append(facts):
            checkers.encoded(written, read)
        for fact in facts:
            checkers.recorded(event, fact, journal.folded)
            journal.folded.apply(fact)
            self._world.tracer.fact(fact)
            if isinstance(fact, NodePut):
                self._world.cluster.decided(fact.node)
        journal.shorten()

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
        assert self.edge is not None
        self.edge.told_period(node, self.edge.wanted_period_s(node), self._world.now_s)
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
            if not self.take(event.node, _progress_message(event)):
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

    # The edge

    def take(self, node: NodeId, message: agents_pb2.AgentMessage) -> bool:
        """A message for the edge; False when there is no controller (any more)."""
        if self.edge is None:
            return False
        return self._handle_all(self.edge.handle(node, message, self._world.now_s))

    def wake(self) -> None:
        """The edge looks at what is due."""
        if self.edge is not None:
            self._handle_all(self.edge.wake(self._world.now_s, self._world.now_s))

    def take_all_progress(self, training: Training) -> None:
        """All agents of an attempt that are heard say how far it is, without a message each."""
        for node in training.nodes:
            if self._world.is_beating(node) and not self.take_progress(training, node):
                return

    def take_progress(self, training: Training, node: NodeId) -> bool:
        """The agent of a node says how far an attempt is."""
        now_s = self._world.now_s
        made = ProgressMade(
            job_id=training.job.job_id,
            attempt=training.attempt,
            node=node,
            completed_step=training.completed(now_s),
            resumed_step=training.resumed,
            at_s=now_s,
        )
        if made.completed_step <= made.resumed_step:
            return True
        return self.take(node, _progress_message(made))

    def _handle_all(self, events: Iterable[ev.Event]) -> bool:
        return all(self.handle(event) for event in events)

    def _settings_of(self, job: JobRecord) -> JobSettings:
        """What the spec of a simulated job would say."""
        plan, world = job.plan, self._world
        return JobSettings(
            layout=Layout(tp=plan.tp, pp=plan.pp, dp=plan.world_size // (plan.tp * plan.pp)),
            limits=world.limits,
            first_step_timeout_s=plan.first_step_timeout_s,
            hang_timeout_s=world.pace.hang_timeout_s,
            modes={name: str(mode) for name, mode in DetectorsSpec()},
        )


def _progress_message(made: ProgressMade) -> agents_pb2.AgentMessage:
    progress = agents_pb2.ProgressMade(
        completed_step=made.completed_step,
        resumed_step=made.resumed_step,
        completed_at_s=made.at_s,
    )
    return agents_pb2.AgentMessage(
        event=agents_pb2.AgentEvent(
            job_id=made.job_id, attempt=made.attempt, at_s=made.at_s, progress=progress
        )
    )
