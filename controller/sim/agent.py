"""A node with its agent and workers: the rules of `controller.agent`, in virtual time.

The command ledger and the event buffer are the production ones. What forking,
killing and checking take is drawn from the seed.

What does not belong here: what the workers of a job do together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.agent.ledger import (
    CommandKind,
    Decision,
    EventBuffer,
    Result,
    Weight,
)
from controller.core import events as ev
from controller.core.attempt_record import AttemptRecord
from controller.core.records import (
    CommandRecord,
    ForgetJob,
    PushCheckpoint,
    RunSuite,
    StartWorkers,
    StopWorkers,
)
from controller.sim.network import Session
from controller.sim.node import Node
from controller.sim.training import Training
from controller.sim.worker import Worker
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, JobId, NodeId
from outlast.worker_contract import WorkerExitCode

if TYPE_CHECKING:
    from controller.sim.world import World

MAX_EVENTS = 200
ABSENCE_LIMIT_S = 1800.0
# How long SIGKILL is waited for before workers are reported as staying.
KILL_S = 10.0

_KIND = {
    StartWorkers: CommandKind.START,
    StopWorkers: CommandKind.STOP,
    RunSuite: CommandKind.SUITE,
    ForgetJob: CommandKind.FORGET,
    PushCheckpoint: CommandKind.PUSH,
}


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
        self.ledger = node.load_ledger(world.fidelity.max_results)
        self.buffer: EventBuffer[AgentEvent] = EventBuffer(MAX_EVENTS)
        self.workers: dict[tuple[JobId, Attempt, int], Worker] = {}
        self.session: Session | None = None
        self._welcomed = False
        self._sent_seq = 0
        self._absences = 0
        self._starting: dict[str, CommandRecord] = {}
        self._start_absence()

    @property
    def is_alive(self) -> bool:
        return self.node.agent is self

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
        self._welcomed = False
        hello = ev.NodeJoined(
            node=self.node.name,
            incarnation=self.incarnation,
            address=f"10.0.0.{self.node.number}",
            rendezvous_port=self.port,
            workers=self.node.workers,
            statuses=self._worker_statuses(),
            predecessor=self.predecessor,
            capacity=self.node.capacity,
        )
        session = self.session
        world.network.send(session, world.controller.accept, session, hello, up=True)
        world.timeline.after(10.0, self._welcome_due, session)

    def _worker_statuses(self) -> tuple[ev.WorkerStatus, ...]:
        """The end of a worker that is still among the events to come is told by them."""
        coming = {
            (end.job_id, end.attempt, end.rank)
            for event in self.buffer.after(0)
            if isinstance(end := event.payload, ev.WorkerExited)
        }
        return tuple(
            ev.WorkerStatus(
                job_id=w.job_id,
                attempt=w.attempt,
                rank=w.rank,
                exit=None if (w.job_id, w.attempt, w.rank) in coming else w.exit,
            )
            for w in self.workers.values()
            if w.is_running or w.exit is not None
        )

    def welcomed(self, session: Session) -> None:
        if session is not self.session or not self.is_alive:
            return
        self._welcomed = True
        self._absences += 1
        self._sent_seq = 0
        for training in self.world.trainings.live():
            if self.node.name in training.rank_nodes:
                self.report_progress(training)
        self._send_events()

    def lost(self, session: Session) -> None:
        """The session ended; try again soon, and give up workers much later."""
        if session is self.session:
            self.session = None
            self._start_absence()
            self.world.reconnect_soon(self)

    def _welcome_due(self, session: Session) -> None:
        if session is self.session and not self._welcomed and self.is_alive:
            self.world.network.drop(session, at_agent=True, at_controller=False)

    def _start_absence(self) -> None:
        self._absences += 1
        self.world.timeline.after(ABSENCE_LIMIT_S, self._absent, self._absences)

    def _absent(self, absence: int) -> None:
        if absence != self._absences or not self.is_alive:
            return
        for worker in self.running():
            self.ledger.stop_attempt(worker.job_id, worker.attempt)
            worker.told = True
            worker.end(WorkerExitCode.STOPPED, FailureClass.CLEAN, "", "no controller for too long")
            self.world.trainings.worker_gone(worker)

    # Events

    def emit(self, event: AgentEvent, weight: Weight) -> None:
        if self.is_alive:
            self.buffer.add(event, weight)
            self._send_events()

    def acknowledged(self, seq: int) -> None:
        if self.is_alive:
            self.buffer.acknowledge(seq)

    def _send_events(self) -> None:
        if self.session is None or not self._welcomed:
            return
        controller = self.world.controller
        for event in self.buffer.after(self._sent_seq):
            self._sent_seq = event.seq
            self.world.network.send(
                self.session,
                controller.receive,
                self.session,
                self.incarnation,
                event.seq,
                event.payload,
                up=True,
            )

    def report_progress(self, training: Training) -> None:
        now_s = self.world.now_s
        completed = training.completed(now_s)
        if completed > training.resumed:
            progress = ProgressMade(
                job_id=training.job.job_id,
                attempt=training.attempt,
                node=self.node.name,
                completed_step=completed,
                resumed_step=training.resumed,
                at_s=now_s,
            )
            self.emit(progress, Weight.PROGRESS)

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
        """A command of the controller, be it new, repeated or stale.

        `attempt` is what an order to start has in common with those of the other nodes.
        """
        if not self.is_alive:
            return
        kind = _KIND[type(command.command)]
        job = command.job or JobId("")
        admission = self.ledger.admit(command.command_id, kind, job, command.attempt)
        if admission.decision is Decision.RUN:
            self._begin(command, job, attempt)
        elif admission.result is not None:
            self._answer(command, admission.result)

    def _begin(self, command: CommandRecord, job: JobId, attempt: AttemptRecord | None) -> None:
        pace, after = self.world.pace, self.world.timeline.after
        match command.command:
            case StartWorkers():
                assert attempt is not None
                self._kill_old(command, job, attempt)
            case StopWorkers(graceful=graceful, timeout_s=timeout_s):
                self._cancel_starts(command)
                if self.node.hides_workers:
                    after(pace.stop_s(), self._only_say_stopped, command)
                    return
                if graceful and self._ask_to_stop(command, timeout_s):
                    return
                after(pace.stop_s(), self._kill, command, self.world.now_s)
            case PushCheckpoint(timeout_s=timeout_s):
                self._push(command, job, self.world.now_s + timeout_s)
            case RunSuite():
                after(pace.suite_s() + self.node.check_delay_s, self._suite_done, command)
            case ForgetJob():
                for worker in self.running(job):
                    worker.kill()
                # Seed 102: those that SIGKILL does not end are still there, whoever forgets them.
                self.workers = {
                    key: worker
                    for key, worker in self.workers.items()
                    if worker.job_id != job or worker.is_running
                }
                self.node.memory.pop(job, None)
                self.node.replicas.pop(job, None)
                forget_s = self.world.random.uniform(0.1, 5.0)
                after(forget_s, self._done, command, Result(ok=True))

    def _push(self, command: CommandRecord, job: JobId, until_s: float) -> None:
        """Answer once the newest step in host memory is committed, or when the time is over."""
        if not self.is_alive:
            return
        world = self.world
        # Each node uploads the newest that it has: parts of different steps make no checkpoint.
        step = world.trainings.newest_everywhere(job)
        if step >= 0 and world.jobs[job].store_up:
            if step not in world.jobs[job].commits:
                world.jobs[job].commits[step] = command.attempt
                self.report_commit(job, step)
            self._done(command, Result(ok=True))
        elif world.now_s < until_s:
            world.timeline.after(10.0, self._push, command, job, until_s)
        else:
            failed = Result(ok=False, detail="not committed", error_kind=ErrorKind.RESOURCE)
            self._done(command, failed)

    def _kill_old(self, command: CommandRecord, job: JobId, attempt: AttemptRecord) -> None:
        """No attempt starts beside an older one, whatever was lost on the way."""
        old = [worker for worker in self.running(job) if worker.attempt < command.attempt]
        if old and self.node.is_stuck:
            stay = Result(ok=False, detail="workers stay", error_kind=ErrorKind.INTERNAL)
            self.world.checkers.suspect(self.node.name, "start failed")
            self.world.timeline.after(KILL_S, self._done, command, stay)
            return
        for worker in old:
            worker.kill()
        self._starting[command.command_id] = command
        standby_s = max(0.0, self.node.standby_until_s - self.world.now_s)
        fork_s = standby_s + self.world.pace.fork_s()
        self.world.timeline.after(fork_s, self._start, command, job, attempt)

    def _cancel_starts(self, command: CommandRecord) -> None:
        for start in list(self._starting.values()):
            if start.job == command.job and start.attempt <= command.attempt:
                del self._starting[start.command_id]
                stale = Result(ok=False, detail="stopped before", error_kind=ErrorKind.STALE)
                self._done(start, stale)

    def _start(self, command: CommandRecord, job: JobId, attempt: AttemptRecord) -> None:
        if not self.is_alive or self._starting.pop(command.command_id, None) is None:
            return
        assert isinstance(command.command, StartWorkers)
        world, start = self.world, command.command
        if self.node.refuses_start:
            world.checkers.suspect(self.node.name, "start failed")
            failed = Result(ok=False, detail="no host memory", error_kind=ErrorKind.RESOURCE)
            self._done(command, failed)
            return
        refused = self._lacks_file() or self._lacks_memory(job)
        if refused is not None:
            self._done(command, refused)
            return
        training = world.trainings.get(job, command.attempt)
        if training is None:
            world.trainings.forget_ended(job)
            training = Training(
                job=world.jobs[job],
                attempt=command.attempt,
                rank_nodes=attempt.rank_nodes,
                endpoint=(attempt.rendezvous_host, attempt.rendezvous_port),
                committed_hint=attempt.committed_step,
                skipped=attempt.skipped,
                replayed_step=attempt.replayed_step or 0,
            )
        for rank in start.ranks:
            worker = Worker(
                agent=self, node=self.node.name, job_id=job, attempt=command.attempt, rank=rank
            )
            self.workers[job, command.attempt, rank] = worker
            world.checkers.worker_started(worker)
            world.trainings.joined(worker, training)
        self.workers = {
            key: worker
            for key, worker in self.workers.items()
            if worker.is_running or worker.job_id != job or worker.attempt == command.attempt
        }
        self._done(command, Result(ok=True))
        if self.node.device_exit:
            self.meet_broken_devices(lambda: 0.1)

    def _lacks_file(self) -> Result | None:
        """What preflight says where a mount has gone; None where it is there."""
        if not self.node.lacks_file:
            return None
        detail = "data.source is '/data', which is not there"
        return Result(ok=False, detail=detail, error_kind=ErrorKind.MISSING)

    def _lacks_memory(self, job: JobId) -> Result | None:
        """The refusal of a job that needs more host memory than there is; None when it fits."""
        node, jobs = self.node, self.world.jobs
        if node.capacity is None:
            return None
        needed, total = jobs[job].memory_bytes, node.capacity.host_memory_bytes
        used = sum(jobs[other].memory_bytes for other in node.memory if other != job)
        if needed > total:
            detail = f"needs {needed} bytes of host memory, {total} in all"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.MISFIT)
        if needed > total - used:
            detail = f"needs {needed} bytes of host memory, {used} of {total} are used"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.OCCUPIED)
        return None

    def meet_broken_devices(self, noticed_s: Callable[[], float]) -> None:
        """Workers that run here end, each so long from now, of the node's broken devices."""
        world, node = self.world, self.node
        world.checkers.suspect(node.name, "device broken")
        for worker in self.running():
            world.timeline.after(noticed_s(), worker.end, 1, node.device_exit, "", node.sickness)

    def _ask_to_stop(self, command: CommandRecord, timeout_s: float) -> bool:
        """Stop after the next step, if the attempt can; killed when that takes too long."""
        targets = self._targets(command)
        training = self.world.trainings.get(command.job or JobId(""), command.attempt)
        if not targets or training is None:
            return False
        for worker in targets:
            worker.told = True
        self.world.trainings.stop_gracefully(training)
        after = self.world.timeline.after
        wait_s = training.step_s + 2.0 if training.stopping else timeout_s
        after(min(wait_s, timeout_s), self._kill, command, self.world.now_s)
        return True

    def _targets(self, command: CommandRecord) -> list[Worker]:
        running = self.running(command.job)
        return [worker for worker in running if worker.attempt <= command.attempt]

    def _kill(self, command: CommandRecord, since_s: float) -> None:
        if not self.is_alive:
            return
        targets = self._targets(command)
        if targets and self.node.is_stuck:
            # They are as good as dead, but they do not go away.
            for worker in targets:
                worker.told = True
                self.world.trainings.worker_gone(worker)
            stay = Result(ok=False, detail="workers stay", error_kind=ErrorKind.INTERNAL)
            self.world.checkers.suspect(self.node.name, "stop failed")
            self.world.timeline.after(KILL_S, self._done, command, stay)
            return
        for worker in targets:
            worker.kill()
        done = [
            worker.completed_step
            for key, worker in self.workers.items()
            if key[:2] == (command.job, command.attempt)
        ]
        self._done(command, Result(ok=True, completed_step=max(done, default=-1)))

    def _only_say_stopped(self, command: CommandRecord) -> None:
        """The workers run on, until a start or whoever repairs the node finds them."""
        if not self.is_alive:
            return
        for worker in self._targets(command):
            worker.told = True
        self._done(command, Result(ok=True))

    def _suite_done(self, command: CommandRecord) -> None:
        if not self.is_alive:
            return
        sickness = "" if self.node.passes_checks else self.node.sickness
        result = Result(ok=True, detail=sickness)
        self._done(command, result, "fail" if sickness else "pass")

    def _done(self, command: CommandRecord, result: Result, verdict: str = "") -> None:
        if not self.is_alive:
            return
        self.ledger.finish(command.command_id, result)
        self._answer(command, result, verdict)

    def _answer(self, command: CommandRecord, result: Result, verdict: str = "") -> None:
        if isinstance(command.command, RunSuite):
            # A repeated suite answers without findings, which is no verdict on the node.
            verdict = verdict or ("inconclusive" if result.ok else "error")
            if verdict in ("fail", "error"):
                self.world.checkers.suspect(self.node.name, "checks failed")
        finished = ev.CommandFinished(
            command_id=command.command_id,
            node=self.node.name,
            ok=result.ok,
            error_kind=result.error_kind,
            detail=result.detail,
            completed_step=result.completed_step,
            verdict=verdict,
        )
        self.emit(finished, Weight.LASTING)
