"""The agent of a simulated node: its session, its events, its workers.

The event buffer is the production one, and so is the machine of commands (`orders`).

What does not belong here: what the workers of a job do together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.inputs import EventsAcknowledged, SessionLost, TimePassed, Welcomed
from controller.agent.core.ledger import CommandLedger
from controller.agent.core.machine import AgentMachine
from controller.agent.core.reports import AttemptKey
from controller.agent.core.workers import WorkerKey
from controller.core import events as ev
from controller.core.attempt_record import AttemptRecord
from controller.core.records import CommandRecord
from controller.sim.attempt import Training
from controller.sim.network import Session
from controller.sim.node import Node
from controller.sim.orders import Orders
from controller.sim.worker import Worker
from outlast.ids import Attempt, JobId, NodeId
from outlast.worker_contract import WorkerExitCode

if TYPE_CHECKING:
    from controller.sim.world import World

MAX_EVENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade:
    """How far the slowest local rank is; the controller's edge turns it into events."""

    job_id: JobId
    attempt: Attempt
    node: NodeId
    completed_step: int
    resumed_step: int
    at_s: float


AgentEvent = (
    ProgressMade
    | ev.WorkerExited
    | ev.CommandFinished
    | ev.CheckpointCommitted
    | ev.CheckpointFailed
    | ev.NodeLeft
)


class Agent:
    """One agent process; a restarted one is another object with another incarnation."""

    def __init__(self, world: World, node: Node) -> None:
        self.world = world
        self.node = node
        node.num_incarnations += 1
        self.incarnation = f"{node.name}.{node.num_incarnations}"
        self.port = 20_000 + node.num_incarnations
        self.predecessor = node.left
        node.left = ""
        self._machine: AgentMachine[AgentEvent] = AgentMachine(
            node.load_ledger(world.fidelity.max_results),
            EventBuffer(MAX_EVENTS),
            now_s=world.now_s,
        )
        self._orders = Orders(self, self._machine)
        self.workers: dict[WorkerKey, Worker] = {}
        self.session: Session | None = None

    def begin(self) -> None:
        """Let time pass from now on."""
        self._orders.give(TimePassed())

    @property
    def is_alive(self) -> bool:
        return self.node.agent is self

    @property
    def ledger(self) -> CommandLedger:
        return self._machine.commands.ledger

    def running(self, job: JobId | None = None) -> list[Worker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.is_running and (job is None or worker.job_id == job)
        ]

    # The session

    def connect(self) -> None:
        """Try to reach the controller; the world calls this when it may succeed."""
        world = self.world
        if not self.is_alive or self.session is not None:
            return
        if world.controller.machine is None or world.network.is_cut(self.node.name):
            return
        self.session = world.network.open(self.node.name)
        statuses = self._worker_statuses()
        self._orders.promises.said_hello(statuses)
        hello = ev.NodeJoined(
            node=self.node.name,
            incarnation=self.incarnation,
            address=f"10.0.0.{self.node.number}",
            rendezvous_port=self.port,
            workers=self.node.workers,
            statuses=statuses,
            predecessor=self.predecessor,
            capacity=self.node.capacity,
        )
        session = self.session
        world.network.send(session, world.controller.accept, session, hello, up=True)
        world.timeline.after(10.0, self._welcome_due, session)

    def _worker_statuses(self) -> tuple[ev.WorkerStatus, ...]:
        """What the workers are, as of the events that the controller has heard."""
        return tuple(
            ev.WorkerStatus(
                job_id=w.job_id,
                attempt=w.attempt,
                rank=w.rank,
                exit=None if self._machine.is_end_coming(w.key) else w.exit,
            )
            for w in self.workers.values()
            if w.is_running or w.exit is not None
        )

    def welcomed(self, session: Session) -> None:
        if session is not self.session or not self.is_alive:
            return
        self._orders.promises.welcomed()
        self._orders.give(Welcomed())
        for training in self.world.trainings.live():
            if self.node.name in training.rank_nodes:
                self.report_progress(training)

    def lost(self, session: Session) -> None:
        """The session ended; try again soon, and give up workers much later."""
        if session is self.session:
            self.session = None
            self._orders.promises.session_lost()
            self._orders.give(SessionLost())
            self.world.reconnect_soon(self)

    def _welcome_due(self, session: Session) -> None:
        if session is self.session and not self._machine.line.is_connected and self.is_alive:
            self.world.network.drop(session, at_agent=True, at_controller=False)

    # Events

    def emit(self, event: AgentEvent, weight: Weight) -> int | None:
        """Have the controller know; the number of the event, None when the agent is dead."""
        if not self.is_alive:
            return None
        attempt = (event.job_id, event.attempt) if isinstance(event, ProgressMade) else None
        seq = self._machine.line.add(event, weight, attempt)
        self._orders.promises.emitted(seq, weight, event)
        self.send_events()
        return seq

    def acknowledged(self, seq: int) -> None:
        if self.is_alive:
            self._orders.give(EventsAcknowledged(seq=seq))
            self._orders.promises.acknowledged(seq)

    def send_events(self) -> None:
        """Send what was not sent in this session."""
        session = self.session
        if session is None:
            return
        for event in self._machine.line.take_unsent():
            self.world.network.send(
                session, self._deliver, session, event.seq, event.payload, up=True
            )

    def _deliver(self, session: Session, seq: int, event: AgentEvent) -> None:
        """An event arrives at the controller."""
        controller = self.world.controller
        if controller.machine is not None and controller.sessions.get(session.node) is session:
            self._orders.promises.delivered(seq)
        controller.receive(session, self.incarnation, seq, event)

    def report_progress(self, training: Training, *, is_last: bool = False) -> None:
        """Report how far an attempt is, now or when that is due."""
        now_s = self.world.now_s
        completed = training.completed(now_s)
        key = AttemptKey(training.job.job_id, training.attempt)
        reports = self._machine.reports
        if completed <= training.resumed or not self.is_alive:
            return
        if reports.is_progress_due(key, completed, now_s, is_last=is_last):
            progress = ProgressMade(
                job_id=training.job.job_id,
                attempt=training.attempt,
                node=self.node.name,
                completed_step=completed,
                resumed_step=training.resumed,
                at_s=now_s,
            )
            self._orders.promises.progress_made(key, completed, is_last=is_last)
            self.emit(progress, Weight.PROGRESS)
        elif (due_s := reports.progress_due_s(key, completed)) < math.inf:
            self.world.timeline.at(due_s, self.report_progress, training)

    def say_goodbye(self) -> None:
        """It was asked to end."""
        goodbye = ev.NodeLeft(node=self.node.name, incarnation=self.incarnation)
        self.emit(goodbye, Weight.LASTING)

    def report_commit(self, job: JobId, step: int) -> None:
        self.emit(ev.CheckpointCommitted(job_id=job, step=step), Weight.LASTING)

    def report_trouble(self, job: JobId, step: int, detail: str) -> None:
        trouble = ev.CheckpointFailed(
            job_id=job, node=self.node.name, step=step, detail=detail, at_s=self.world.now_s
        )
        self.emit(trouble, Weight.LASTING)

    # Commands

    def receive(self, command: CommandRecord, attempt: AttemptRecord | None) -> None:
        """A command of the controller; see `Orders.receive`."""
        if self.is_alive:
            self._orders.receive(command, attempt)

    def worker_ended(self, worker: Worker) -> None:
        """A process has ended, or seems to."""
        self._orders.worker_ended(worker)

    def report_end(self, worker: Worker, *, is_last: bool) -> int | None:
        """Report what a worker completed, then its end; the number of that event, if any."""
        end = worker.exit
        key = AttemptKey(worker.job_id, worker.attempt)
        training = self.world.trainings.get(worker.job_id, worker.attempt)
        if is_last and training is not None and self.world.fidelity.idle_messages:
            self.report_progress(training, is_last=True)
        if is_last:
            self._machine.reports.end(key)
        if end is None:
            # The node says that it ended, and lies.
            return None
        is_news = end.code == WorkerExitCode.DONE or not end.stopped
        if not is_news and not self.world.fidelity.idle_messages:
            return None
        return self.emit(end, Weight.LASTING)

    def report_result(self, finished: ev.CommandFinished) -> None:
        """A command was answered."""
        self.emit(finished, Weight.LASTING)

    def meet_broken_devices(self, noticed_s: Callable[[], float]) -> None:
        """Workers that run here end, each so long from now, of the node's broken devices."""
        world, node = self.world, self.node
        world.checkers.suspect(node.name, "device broken")
        for worker in self.running():
            world.timeline.after(noticed_s(), worker.end, 1, node.device_exit, "", node.sickness)
