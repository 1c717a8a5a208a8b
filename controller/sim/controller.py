"""The production machine in a controller that may die between any two effects.

Everything that it knows after a restart comes from the journal, which holds
encoded changes only. Who is late, who has advanced and which job hangs is decided by the
production edge; `heartbeats` brings it what agents would say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from controller.core import events as ev
from controller.core.changes import NodePut, StateChange
from controller.core.edge.edge import BEFORE_DEADLINE_S, Edge
from controller.core.edge.judgement import HangJudgement, HangSign
from controller.core.edge.liveness import Limits
from controller.core.edge.settings import NO_JOB, JobSettings
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
from controller.core.machine import Machine
from controller.core.node_events import NodeClosed, NodeFound, NodeSilent
from controller.core.records import JobRecord
from controller.core.settings import Settings
from controller.sim.attempt import Training
from controller.sim.heartbeats import Heartbeats
from controller.sim.journal import DeposedError, Journal
from controller.sim.network import Session
from controller.sim.ranks import progress_of
from controller.sim.streams import Streams
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
        self.streams: Streams | None = None
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
        no_job = replace(NO_JOB, limits=world.limits, heartbeat_period_s=world.heartbeat_s)
        self.edge = Edge(state, self._settings_of, no_job=no_job)
        self.edge.expect_known(world.now_s)
        self.streams = Streams(world, self, state, self.edge)
        self._timer_s = None
        world.trace("control", f"term {self.term}", f"started, {len(self.journal.changes)} changes")
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
        sessions = self.sessions
        self.machine = self.edge = self.streams = None
        self.crash_countdown = None
        for session in sessions.values():
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
            event = NodeSilent(node=node, silent_s=3600.0)
            for effect in old.handle(event, self._world.now_s):
                if isinstance(effect, Persist):
                    try:
                        self._append(event, effect.changes, term)
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
            for index, effect in enumerate(effects):
                self._count_down()
                world.checkers.ordered(index, effect, self.journal.folded)
                self._perform(event, effect)
                if self.machine is not machine:
                    # Seed 783: it died of an event that this effect brought about.
                    return False
            self._count_down()
            wake_s = machine.wake_at()
            world.checkers.performed(event, machine, self.journal.folded, wake_s)
        except _Crash:
            self.crash()
            return False
        self._set_timer(wake_s)
        changes = [
            each for effect in effects if isinstance(effect, Persist) for each in effect.changes
        ]
        if changes and self.edge is not None:
            changed = self.edge.refresh(changes, world.now_s)
            if self.streams is not None:
                self.streams.retell_periods(changed)
            self.heartbeats.refreshed(changes)
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
            case Persist(changes=changes):
                self._append(event, changes, self.term)
            case SendCommand(command=command, start=start):
                if self.streams is not None:
                    self.streams.command(command, start)
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

    def _append(self, event: ev.Event, changes: Sequence[StateChange], term: int) -> None:
        journal, checkers = self.journal, self._world.checkers
        journal.check(term)
        checkers.appends(term, self.term)
        for written, read in journal.append(changes):
            checkers.encoded(written, read)
        for change in changes:
            checkers.recorded(event, change, journal.folded)
            journal.folded.apply(change)
            self._world.tracer.change(change)
            if isinstance(change, NodePut):
                self._world.cluster.decided(change.node)
        journal.shorten()

    def _search(self, effect: SearchFaults) -> None:
        """The checks of a search: they take a while, and die with the controller."""
        world = self._world
        world.trace("search", effect.search, ", ".join(effect.nodes))
        world.checkers.searched(effect.nodes)
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

    def _found(self, node: NodeId, effect: SearchFaults) -> NodeFound:
        """What a search says of a node: sick, silent, gone, or well."""
        world = self._world
        machine = world.nodes[node]
        if machine.agent is None or node not in self.sessions:
            return NodeFound(node=node, verdict="error", detail="its session ended")
        if machine.passes_checks:
            return NodeFound(node=node, verdict="pass", detail="", figure=1.0)
        if machine.is_corrupt:
            world.checkers.suspect(node, "checks failed")
            return NodeFound(node=node, verdict="fail", detail="wrong bits", is_corrupt=True)
        if machine.sickness or machine.check_delay_s >= effect.timeout_s:
            world.checkers.suspect(node, "checks failed")
            detail = machine.sickness or "its checks did not end in time"
            return NodeFound(node=node, verdict="fail", detail=detail, figure=0.4)
        return NodeFound(node=node, verdict="pass", detail="", figure=1.0)

    def _set_timer(self, wake_s: float | None) -> None:
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

    @property
    def sessions(self) -> Mapping[NodeId, Session]:
        """Of every connected node."""
        return {} if self.streams is None else self.streams.sessions

    def hear(self, session: Session, message: agents_pb2.AgentMessage) -> None:
        """A message of an agent arrives; without a controller its session ends."""
        if self.streams is not None:
            self.streams.hear(session, message)
        elif message.WhichOneof("kind") == "hello":
            self._world.network.drop(session, at_agent=True, at_controller=False)

    def lost(self, session: Session) -> None:
        """The session ended."""
        if self.streams is not None:
            self.streams.lost(session)

    # The edge

    def take(self, node: NodeId, message: agents_pb2.AgentMessage) -> bool:
        """A message that comes at once; False when there is no controller (any more)."""
        self._world.tracer.message(message)
        return self.streams is not None and self.streams.take(node, message)

    def take_closed(self, event: NodeClosed) -> None:
        """What the cluster says of a node's host."""
        self.handle(event)
        if self.edge is not None:
            self.handle_all(self.edge.closed(event, self._world.now_s))

    def wake(self) -> None:
        """The edge looks at what is due."""
        if self.edge is not None:
            self.handle_all(self.edge.wake(self._world.now_s, self._world.now_s))

    def take_all_progress(self, training: Training) -> None:
        """All agents of an attempt that are heard say how far it is: all of them the same."""
        event = progress_of(training, self._world.now_s)
        if event is None:
            return
        message = agents_pb2.AgentMessage(event=event)
        for node in training.nodes:
            if self._world.is_beating(node) and not self.take(node, message):
                return

    def take_progress(self, training: Training, node: NodeId) -> bool:
        """The agent of a node says how far an attempt is."""
        event = progress_of(training, self._world.now_s)
        return event is None or self.take(node, agents_pb2.AgentMessage(event=event))

    def handle_all(self, events: Iterable[ev.Event]) -> bool:
        """Give the machine some events; False when the controller dies of one."""
        is_alive = all(map(self.handle, events))
        if self.edge is not None:
            for judgement in self.edge.take_judgements():
                took_s = self._world.pace.judge_s()
                if judgement.sign is HangSign.NO_FIRST_STEP:
                    # Production asks early enough for the answer.
                    took_s = min(took_s, BEFORE_DEADLINE_S / 2)
                self._world.timeline.after(took_s, self._judged, self.term, judgement)
        return is_alive

    def _judged(self, term: int, judgement: HangJudgement) -> None:
        """Who holds up a job has been worked out, beside everything else that happened."""
        if self.edge is None or term != self.term:
            return
        events = self.edge.judged(judgement, judgement.judge())
        if not events:
            self._world.tracer.overtaken(judgement.job_id)
        self.handle_all(events)

    def _settings_of(self, job: JobRecord) -> JobSettings:
        """What the spec of a simulated job would say."""
        plan, world = job.plan, self._world
        period_s = world.jobs[job.job_id].heartbeat_s
        slower, limits = period_s / world.heartbeat_s, world.limits
        return JobSettings(
            layout=Layout(tp=plan.tp, pp=plan.pp, dp=plan.world_size // (plan.tp * plan.pp)),
            heartbeat_period_s=period_s,
            limits=Limits(
                late_s=slower * limits.late_s,
                lost_s=slower * limits.lost_s,
                silent_s=slower * limits.silent_s,
            ),
            first_step_timeout_s=plan.first_step_timeout_s,
            hang_timeout_s=world.pace.hang_timeout_s,
            modes=world.jobs[job.job_id].modes,
        )
