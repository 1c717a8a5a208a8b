"""The agent of a simulated node: its session, its events, its workers.

The event buffer is the production one, and so is the machine of commands (`orders`).

What does not belong here: what the workers of a job do together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.inputs import (
    AbsenceLimitSet,
    EventsAcknowledged,
    KeptEnded,
    SessionLost,
    TimePassed,
    Welcomed,
)
from controller.agent.core.ledger import CommandLedger
from controller.agent.core.machine import AgentMachine
from controller.agent.core.reports import AttemptKey
from controller.agent.core.workers import WorkerKey, taken_over
from controller.agent.wire import introduction
from controller.core.kinds import Cause
from controller.sim.attempt import Training
from controller.sim.network import Session
from controller.sim.node import Node
from controller.sim.orders import Orders
from controller.sim.ranks import progress_of
from controller.sim.worker import Worker
from outlast.failures import FailureClass
from outlast.ids import Attempt, JobId
from outlast.v1 import agents_pb2, common_pb2
from outlast.worker_contract import WorkerExitCode

if TYPE_CHECKING:
    from controller.sim.world import World

MAX_EVENTS = 200
# Few enough that some of the small nodes here have more to say, as large ones do.
_MOST_HELLO_BYTES = 4_096


class Agent:
    """One agent process; a restarted one is another object with another incarnation."""

    def __init__(self, world: World, node: Node) -> None:
        self.world = world
        self.node = node
        node.num_incarnations += 1
        self.incarnation = f"{node.name}.{node.num_incarnations}"
        self.port = 20_000 + node.num_incarnations
        self.replica_port = 40_000 + node.num_incarnations
        self.predecessor = node.left
        node.left = ""
        self._machine: AgentMachine[agents_pb2.AgentEvent] = AgentMachine(
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

    def take_over(self, workers: list[Worker]) -> None:
        """Processes that have left an older attempt and live on go on as these workers."""
        kept = [key for key, worker in self.workers.items() if worker.is_kept]
        for key in taken_over(kept, [worker.key for worker in workers]).values():
            self.workers[key].let_go()

    def all_kept(self) -> list[Worker]:
        """Those of all ranks and jobs; none where their ends are out of the agent's hands."""
        if self.node.is_stuck or self.node.hides_workers:
            return []
        return [one for one in self.workers.values() if one.is_kept]

    # The session

    def connect(self) -> None:
        """Try to reach the controller; the world calls this when it may succeed."""
        world = self.world
        if not self.is_alive or self.session is not None:
            return
        if world.controller.machine is None or world.network.is_cut(self.node.name):
            return
        self.session = world.network.open(self.node.name)
        session = self.session
        for message in introduction(self._hello(), most_bytes=_MOST_HELLO_BYTES):
            world.network.send(session, world.controller.hear, session, message, up=True)
        world.timeline.after(10.0, self._welcome_due, session)

    def _hello(self) -> agents_pb2.Hello:
        capacity = self.node.capacity
        statuses = self._worker_statuses()
        self._orders.promises.said_hello(statuses)
        return agents_pb2.Hello(
            node_id=self.node.name,
            incarnation=self.incarnation,
            address=f"10.0.0.{self.node.number}",
            rendezvous_port=self.port,
            replica_port=self.replica_port,
            replica_token=self.incarnation,
            workers=self.node.workers,
            worker_statuses=statuses,
            predecessor=self.predecessor,
            capacity=None if capacity is None else common_pb2.NodeCapacity(**asdict(capacity)),
        )

    def _worker_statuses(self) -> list[agents_pb2.WorkerStatus]:
        """What the workers are, as of the events that the controller has heard."""
        return [
            agents_pb2.WorkerStatus(
                job_id=w.job_id,
                attempt=w.attempt,
                rank=w.rank,
                running=w.exit is None or self._machine.is_end_coming(w.key),
                exit=w.exit,
            )
            for w in self.workers.values()
            if w.is_running or w.exit is not None
        ]

    def hear(self, session: Session, message: agents_pb2.ControllerMessage) -> None:
        """A message of the controller arrives."""
        if not self.is_alive:
            return
        match message.WhichOneof("kind"):
            case "welcome" if session is self.session:
                self._welcomed(message.welcome)
            case "acked_event_seq" if session is self.session:
                self._orders.give(EventsAcknowledged(seq=message.acked_event_seq))
                self._orders.promises.acknowledged(message.acked_event_seq)
            case "command":
                self._orders.receive(message.command)

    def _welcomed(self, welcome: agents_pb2.Welcome) -> None:
        self._orders.promises.welcomed()
        self._orders.give(AbsenceLimitSet(limit_s=welcome.controller_absence_limit_s))
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

    def emit(self, event: agents_pb2.AgentEvent, weight: Weight) -> int | None:
        """Have the controller know; the number of the event, None when the agent is dead."""
        if not self.is_alive:
            return None
        event.at_s = self.world.now_s
        seq = self._machine.line.add(event, weight, (event.job_id, event.attempt))
        event.seq = seq
        self._orders.promises.emitted(event, weight)
        self.send_events()
        return seq

    def send_events(self) -> None:
        """Send what was not sent in this session."""
        session = self.session
        if session is None:
            return
        for event in self._machine.line.take_unsent():
            message = agents_pb2.AgentMessage(event=event.payload)
            self.world.network.send(session, self._deliver, session, message, up=True)

    def _deliver(self, session: Session, message: agents_pb2.AgentMessage) -> None:
        """An event arrives at the controller."""
        controller = self.world.controller
        if controller.sessions.get(session.node) is session:
            self._orders.promises.delivered(message.event.seq)
        controller.hear(session, message)

    def report_progress(self, training: Training, *, is_last: bool = False) -> None:
        """Report how far an attempt is, if that is due."""
        event = progress_of(training, self.world.now_s)
        if event is None or not self.is_alive:
            return
        completed = event.progress.completed_step
        key = AttemptKey(training.job.job_id, training.attempt)
        if self._machine.reports.is_progress_due(key, completed, is_last=is_last):
            self._orders.promises.progress_made(key, completed, is_last=is_last)
            self.emit(event, Weight.PROGRESS)

    def say_goodbye(self) -> None:
        """It was asked to end."""
        goodbye = agents_pb2.Goodbye(incarnation=self.incarnation)
        self.emit(agents_pb2.AgentEvent(goodbye=goodbye), Weight.LASTING)

    def report_commit(self, job: JobId, attempt: Attempt, step: int, saved_by: Attempt) -> None:
        committed = agents_pb2.CheckpointCommitted(step=step, saved_by_attempt=saved_by)
        event = agents_pb2.AgentEvent(job_id=job, attempt=attempt, checkpoint_committed=committed)
        self.emit(event, Weight.LASTING)

    def report_trouble(self, job: JobId, attempt: Attempt, step: int, detail: str) -> None:
        trouble = agents_pb2.CheckpointTrouble(step=step, stage="upload", detail=detail)
        event = agents_pb2.AgentEvent(job_id=job, attempt=attempt, checkpoint_trouble=trouble)
        self.emit(event, Weight.LASTING)

    def report_device(self, message: str) -> None:
        """What the kernel says of the node's devices; nothing once they are well again."""
        sign = agents_pb2.HostSign(subject=Cause.KERNEL_LOG, what="gpu", message=message)
        self.emit(agents_pb2.AgentEvent(host_sign=sign), Weight.LASTING)

    def kill_data_loaders(self) -> None:
        """The processes that read data for ranks are killed; ranks go on."""
        self._orders.data_loaders.kill()

    # Commands

    def worker_ended(self, worker: Worker) -> None:
        """A process has ended, or seems to."""
        self._orders.worker_ended(worker)

    def kept_ended(self, worker: Worker) -> None:
        """A process that had left its attempt has ended, or takes part in another."""
        self._orders.give(KeptEnded(key=worker.key))

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
        exited = agents_pb2.WorkerExited(rank=worker.rank, exit=end)
        event = agents_pb2.AgentEvent(
            job_id=worker.job_id, attempt=worker.attempt, worker_exited=exited
        )
        return self.emit(event, Weight.LASTING)

    def meet_broken_devices(self, noticed_s: Callable[[], float]) -> None:
        """Workers that run here end, each so long from now, of the node's broken devices."""
        world, node = self.world, self.node
        world.checkers.suspect(node.name, "device broken")
        if node.device_exit is FailureClass.DEVICE:
            self.report_device(f"NVRM: Xid (PCI:0000:1b:00): 48, {node.sickness}")
        for worker in self.running():
            world.timeline.after(noticed_s(), worker.end, 1, node.device_exit)
