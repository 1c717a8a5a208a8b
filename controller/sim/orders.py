"""What an agent's command machine decides, done by simulated processes.

The machine is the production one. What forking, killing and checking take is drawn
from the seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

from controller.agent.core.actions import (
    Action,
    Answer,
    CancelStep,
    ForgetWorkers,
    GiveUpWorkers,
    KeepLedger,
    ReportDataLoader,
    ReportEnd,
    RunStep,
    SendEvents,
    Signal,
    SignalWorkers,
    StartDataLoader,
    StopDataLoader,
    StopFailed,
)
from controller.agent.core.buffer import Weight
from controller.agent.core.driver import Driver
from controller.agent.core.inputs import (
    Command,
    CommandReceived,
    EndReported,
    Input,
    LedgerKept,
    StepEnded,
    TimePassed,
    WorkerEnded,
    WorkersRequested,
)
from controller.agent.core.ledger import CommandKind, Result
from controller.agent.core.machine import AgentMachine
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import StartFacts, Step
from controller.agent.core.workers import WorkerKey
from controller.agent.wire import answer, command_of, kind_of
from controller.sim.data_loaders import DataLoaders
from controller.sim.order import Order, training_of, without_nodes
from controller.sim.order_memory import OrderMemory
from controller.sim.promises import Promises
from controller.sim.worker import Worker
from outlast.failures import ErrorKind
from outlast.ids import JobId
from outlast.v1 import agents_pb2, diagnostics_pb2

if TYPE_CHECKING:
    from controller.sim.agent import Agent


class Orders:
    """Commands of one agent."""

    def __init__(self, agent: Agent, machine: AgentMachine[agents_pb2.AgentEvent]) -> None:
        self._agent = agent
        self._node, self._world = agent.node, agent.world
        self._after = agent.world.timeline.after
        self._machine = machine
        self.promises = Promises(agent, machine)
        self._driver = Driver(machine.handle, self._perform, lambda: self._world.now_s)
        self._orders: dict[str, Order] = {}
        # Jobs whose checkpoints this agent process has looked after.
        self._uploading: set[JobId] = set()
        self._memory = OrderMemory(agent, self.promises)
        self.data_loaders = DataLoaders(agent, self.promises, self.give)
        self._wake_s: float | None = None

    def receive(self, message: agents_pb2.Command) -> None:
        """A command of the controller, be it new, repeated or stale."""
        kind = kind_of(message)
        assert kind is not None, f"{message.command_id} is of no known kind"
        command = command_of(message, kind)
        order = Order(command=command, message=message)
        if kind is CommandKind.START:
            order.start = self._world.trainings.start_of(message)
            order.message = without_nodes(message)
        self._orders.setdefault(command.command_id, order)
        self.promises.received(command)
        self.give(CommandReceived(command=command))

    def worker_ended(self, worker: Worker) -> None:
        """A process has ended, or seems to."""
        completed_step, is_kept = worker.completed_step, worker.is_kept
        ended = WorkerEnded(key=worker.key, completed_step=completed_step, is_kept=is_kept)
        self.give(ended)
        if self._agent.is_alive and not worker.is_hidden and not self._driver.is_handling:
            self.promises.worker_ended(worker.key)

    # The machine

    def give(self, given: Input) -> None:
        """Have the machine take this in."""
        if not self._agent.is_alive:
            return
        if self._driver.is_handling:
            # It waits for its turn; the turn that is under way looks at the timer at its end.
            self._driver.give(given)
            return
        self._driver.give(given)
        self.promises.taken_in()
        wake_s = self._machine.wake_at()
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s):
            self._wake_s = wake_s
            self._world.timeline.at(wake_s, self._wake, wake_s)

    def _wake(self, at_s: float) -> None:
        if self._wake_s == at_s:
            self._wake_s = None
            self.give(TimePassed())

    def _perform(self, action: Action) -> None:
        match action:
            case KeepLedger(command_id=command_id):
                self.promises.ledger_kept()
                if command_id:
                    self.give(LedgerKept(command_id=command_id))
            case RunStep(command_id=command_id, step=step):
                self.promises.step_begins(command_id)
                self._run_step(command_id, step)
            case CancelStep(command_id=command_id, step=step):
                self._orders[command_id].is_cancelled = True
                self._step_ended(command_id, step)
            case SignalWorkers(command_id=command_id, keys=keys, signal=signal):
                self._signal(self._orders.get(command_id), keys, signal)
            case ReportEnd(key=key, is_last=is_last):
                self.promises.end_reported(key)
                seq = self._agent.report_end(self._agent.workers[key], is_last=is_last)
                if seq is not None:
                    self.give(EndReported(key=key, seq=seq))
            case ForgetWorkers(keys=keys):
                for key in keys:
                    # Seed 102: those that SIGKILL does not end are still there.
                    if not self._agent.workers[key].is_running:
                        del self._agent.workers[key]
            case Answer(command=command, result=result):
                self._answer(command, result)
            case SendEvents():
                self._agent.send_events()
            case GiveUpWorkers():
                self.promises.gave_up()
                self._world.trace("agent", self._node.name, "gives its workers up")
            case StartDataLoader() | StopDataLoader() | ReportDataLoader():
                self.data_loaders.perform(action)
            case StopFailed():
                self._world.checkers.suspect(self._node.name, "stop failed")
            case _:
                assert_never(action)

    def _step_ended(
        self,
        command_id: str,
        step: Step,
        failure: Result | None = None,
        found: StartFacts | None = None,
    ) -> None:
        self.give(StepEnded(command_id=command_id, step=step, failure=failure, found=found))

    def _run_step(self, command_id: str, step: Step) -> None:
        order = self._orders.get(command_id)
        pace, node = self._world.pace, self._node
        match step:
            case Step.LEFTOVERS:
                self._after_leftovers(command_id, order)
                return
            case Step.CHECK | Step.STACKS:
                self._step_ended(command_id, step)
                return
            case _:
                assert order is not None
        match step:
            case Step.CLEAN_UP:
                if 0 in order.message.start_workers.ranks:
                    self._say_what_is_stored(order)
                self._step_ended(command_id, step)
            case Step.HAND_OVER | Step.FOLDERS | Step.KEEP_COPIES | Step.FREE_COPIES | Step.DRAIN:
                self._memory.do(order, step)
                self._step_ended(command_id, step)
            case Step.PREFLIGHT:
                standby_s = max(0.0, node.standby_until_s - self._world.now_s)
                self._after(standby_s + pace.fork_s(), self._preflight_done, order)
            case Step.FORK:
                self._fork(order)
            case Step.SUITE:
                self._after(pace.suite_s() + node.check_delay_s, self._suite_done, order)
            case Step.PUSH:
                timeout_s = order.message.push_checkpoint.timeout_s
                self._push(order, self._world.now_s + timeout_s)
            case Step.FREE:
                self.promises.nobody_is_kept(order.command)
                node.free_memory(order.job)
                free_s = self._world.random.uniform(0.1, 5.0)
                self._after(free_s, self._step_ended, command_id, step)
            case _:
                raise AssertionError(f"{step.value} is a step of the machine")

    # Stops

    def _signal(self, order: Order | None, keys: Iterable[WorkerKey], signal: Signal) -> None:
        workers = [self._agent.workers[key] for key in keys]
        is_stop = order is not None and order.is_stop
        if order is not None and is_stop and self._node.hides_workers:
            stop_s = self._world.pace.stop_s()
            self._settle(order, stop_s)
            self._after(stop_s, self._hide, workers)
        elif signal in (Signal.STOP, Signal.LEAVE_AFTER_STEP):
            self._ask(order, workers, lives_on=signal is Signal.LEAVE_AFTER_STEP)
        elif order is not None and signal is Signal.LEAVE:
            leave_s = self._world.pace.stop_s()
            self._settle(order, leave_s)
            self._after(leave_s, self._leave, workers)
        elif order is not None and is_stop and order.settled_s is None:
            stop_s = self._world.pace.stop_s()
            self._settle(order, stop_s)
            self._after(stop_s, self._kill, order, workers)
        else:
            self._kill(order, workers)

    def _settle(self, order: Order, after_s: float) -> None:
        order.settled_s = self._world.now_s + after_s

    def _ask(self, order: Order | None, workers: list[Worker], *, lives_on: bool) -> None:
        """Workers stop after the next step, if their attempt can."""
        trainings = self._world.trainings
        for worker in workers:
            worker.is_stopped, worker.lives_on = True, lives_on
        if order is not None:
            self._settle(order, 0.0)
        for job, attempt in dict.fromkeys((worker.job_id, worker.attempt) for worker in workers):
            training = trainings.get(job, attempt)
            if training is None:
                continue
            trainings.stop_gracefully(training)
            if order is not None and training.stopping and attempt == order.attempt:
                self._settle(order, min(training.step_s + 2.0, order.command.timeout_s))

    def _leave(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.leave()

    def _kill(self, order: Order | None, workers: list[Worker]) -> None:
        if not self._agent.is_alive:
            return
        if self._node.is_stuck and any(worker.is_running for worker in workers):
            # They are as good as dead, but they do not go away.
            for worker in workers:
                worker.is_stopped = True
                self._world.trainings.worker_gone(worker)
            is_start = order is not None and order.start is not None
            self._world.checkers.suspect(
                self._node.name, "start failed" if is_start else "stop failed"
            )
            return
        for worker in workers:
            worker.kill()

    def _hide(self, workers: list[Worker]) -> None:
        """They run on, until a start or whoever repairs the node finds them."""
        for worker in workers:
            worker.is_stopped = worker.is_hidden = True
            self.worker_ended(worker)

    def _after_leftovers(self, command_id: str, order: Order | None) -> None:
        if order is None or not order.is_stop:
            known = set(self._machine.commands.workers.alive())
            for worker in self._agent.running(None if order is None else order.job):
                # What the node hid from a stop.
                if worker.key not in known:
                    worker.kill()
            self._step_ended(command_id, Step.LEFTOVERS)
            return
        if order.settled_s is None:
            self._settle(order, self._world.pace.stop_s())
        assert order.settled_s is not None
        if order.settled_s > self._world.now_s:
            at_s = order.settled_s
            self._world.timeline.at(at_s, self._step_ended, command_id, Step.LEFTOVERS)
        else:
            self._step_ended(command_id, Step.LEFTOVERS)

    # Starts

    def _preflight_done(self, order: Order) -> None:
        if not self._agent.is_alive or order.is_cancelled:
            return
        refused, found = self._refusal(order.job), self._memory.facts(order)
        self._step_ended(order.command.command_id, Step.PREFLIGHT, refused, found)

    def _refusal(self, job: JobId) -> Result | None:
        """What preflight says that this node lacks."""
        if self._node.refuses_start:
            self._world.checkers.suspect(self._node.name, "start failed")
            detail = "no host memory"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.RESOURCE)
        if self._node.lacks_file:
            detail = "data.source is '/data', which is not there"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.MISSING)
        return self._node.lacks_memory(job, self._world.jobs)

    def _fork(self, order: Order) -> None:
        world, agent = self._world, self._agent
        training = training_of(world, order)
        training.peers[self._node.name] = tuple(order.message.start_workers.replica_peers)
        self.promises.forked(order.command)
        self._memory.check_fork(order)
        workers = [
            Worker(
                agent=agent,
                node=self._node.name,
                job_id=order.job,
                attempt=order.attempt,
                rank=rank,
            )
            for rank in order.message.start_workers.ranks
        ]
        key = AttemptKey(order.job, order.attempt)
        self._machine.reports.begin(key, world.now_s)
        self.give(WorkersRequested(keys=tuple(worker.key for worker in workers)))
        agent.take_over(workers)
        for worker in workers:
            agent.workers[worker.key] = worker
            world.checkers.worker_started(worker)
            world.trainings.joined(worker, training)
        self._step_ended(order.command.command_id, Step.FORK)
        if self._node.device_exit:
            agent.meet_broken_devices(lambda: 0.1)

    # Uploads, checks, answers

    def _push(self, order: Order, until_s: float) -> None:
        """Done once the newest step in host memory is committed, failed when time is over."""
        if not self._agent.is_alive:
            return
        world, job, command_id = self._world, order.job, order.command.command_id
        # Each node uploads the newest that it has: parts of different steps make no checkpoint.
        step = world.trainings.newest_everywhere(job)
        self._say_what_is_stored(order)
        if step >= 0 and world.jobs[job].store_up:
            if step not in world.jobs[job].commits:
                world.jobs[job].commits[step] = order.attempt
                self._agent.report_commit(job, order.attempt, step, order.attempt)
            self._step_ended(command_id, Step.PUSH)
        elif world.now_s < until_s:
            self._after(10.0, self._push, order, until_s)
        else:
            failed = Result(ok=False, detail="not committed", error_kind=ErrorKind.RESOURCE)
            self._step_ended(command_id, Step.PUSH, failed)

    def _say_what_is_stored(self, order: Order) -> None:
        """As an uploader does that begins: its predecessor's report may be lost."""
        job, commits = order.job, self._world.jobs[order.job].commits
        if job not in self._uploading and commits:
            newest = max(commits)
            self._agent.report_commit(job, order.attempt, newest, commits[newest])
        self._uploading.add(job)

    def _suite_done(self, order: Order) -> None:
        if order.is_cancelled:
            return
        is_sick = bool(self._node.sickness) and not self._node.passes_checks
        self._world.checkers.users.checked(self._node.name, passed=not is_sick)
        finding = diagnostics_pb2.Finding(
            test="simulated",
            node=self._node.name,
            verdict="fail" if is_sick else "pass",
            detail=self._node.sickness if is_sick else "",
        )
        order.findings = (finding,)
        if is_sick:
            self._world.checkers.suspect(self._node.name, "checks failed")
        self._step_ended(order.command.command_id, Step.SUITE)

    def _answer(self, command: Command, result: Result) -> None:
        order = self._orders.pop(command.command_id, None)
        if order is None:
            self.promises.answered_again(command.command_id)
            return
        is_suite = command.kind is CommandKind.SUITE
        if is_suite and not result.ok and result.error_kind is not ErrorKind.STALE:
            self._world.checkers.suspect(self._node.name, "checks failed")
        self.promises.answered(command, result)
        answered = answer(command, result, at_s=self._world.now_s, findings=order.findings)
        self._agent.emit(answered, Weight.LASTING)
