"""Applies commands, each at most once, and answers each run exactly once.

A command goes through the steps of its kind. It begins once the ledger that admits
it is on disk; what ends something is done even where the disk is full: if the agent
dies, the workers that it was about die too. Commands run side by side, so that a
stop is never behind a start that waits for something; a stop also ends the starts
and suites of its attempt, and of older ones, that are still under way.

What does not belong here: how a step is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

from controller.agent.core import steps
from controller.agent.core.actions import (
    Action,
    Answer,
    CancelStep,
    ForgetWorkers,
    KeepLedger,
    ReportEnd,
    RunStep,
    Signal,
    SignalWorkers,
    StopFailed,
)
from controller.agent.core.inputs import (
    Command,
    CommandInput,
    CommandReceived,
    EndReported,
    KeptEnded,
    LedgerKept,
    StepEnded,
    WorkerEnded,
    WorkerForked,
    WorkerNotForked,
    WorkersRequested,
)
from controller.agent.core.ledger import CommandKind, CommandLedger, Decision, Result
from controller.agent.core.loaders import DataLoaderTable
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import STEPS, StartFacts, Step
from controller.agent.core.workers import WorkerKey, WorkerState, WorkerTable, taken_over
from outlast.failures import ErrorKind

# Nobody asks again soon to free what a job holds, so what fails is tried again here.
FORGET_TRIES = 3
FORGET_PAUSE_S = 1.0

_SIGNALS = {Step.LEAVE: Signal.LEAVE, Step.ASK: Signal.STOP, Step.KILL: Signal.KILL}
_OVERTAKEN = (CommandKind.START, CommandKind.SUITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLimits:
    """How long things may take."""

    kill_s: float = 10.0
    """From SIGKILL until a process must be gone."""
    leave_s: float = 2.0
    """For workers to leave their attempt, before SIGKILL."""
    absence_stop_s: float = 30.0
    """Graceful part of stopping workers that have had no controller for too long."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A command under way."""

    command: Command
    # A stop of the agent's own, which nobody waits for.
    is_own: bool = False
    # None until the ledger is on disk, and in a pause between two tries.
    step: Step | None = None
    left: Iterator[Step] = field(default_factory=lambda: iter(()))
    # When a wait of the machine itself is over: for workers to end, or for the next try.
    deadline_s: float = math.inf
    # Whom it ends.
    targets: tuple[WorkerState, ...] = ()
    num_tries: int = 0
    # Of a start, once preflight has found it.
    facts: StartFacts | None = None
    # A stop has overtaken it: its step is given up.
    is_overtaken: bool = False

    @property
    def is_waiting_for_workers(self) -> bool:
        return self.step in _SIGNALS

    @property
    def alive(self) -> list[WorkerState]:
        """Those whose end this command waits for: a stop that keeps does not of the kept, nor a
        start of those that it takes over."""
        command = self.command
        kept = [worker.key for worker in self.targets if worker.is_kept and not command.keep]
        starting = [WorkerKey(command.job_id, command.attempt, rank) for rank in command.ranks]
        ending = set(kept).difference(taken_over(kept, starting).values())
        return [worker for worker in self.targets if worker.is_running or worker.key in ending]


class CommandMachine:
    """Decides what happens to commands and to the workers that they are about."""

    def __init__(self, ledger: CommandLedger, limits: CommandLimits | None = None) -> None:
        self.ledger = ledger
        self.workers = WorkerTable()
        self.loaders = DataLoaderTable()
        self._limits = CommandLimits() if limits is None else limits
        # In the order in which they came.
        self._running: dict[str, _Running] = {}
        self._num_own_stops = 0
        self._actions: list[Action] = []
        self._now_s = 0.0

    def handle(self, given: CommandInput, now_s: float) -> list[Action]:
        """Take in what has happened; what is to be done about it, in this order."""
        self._now_s = now_s
        match given:
            case CommandReceived(command=command):
                self._receive(command)
            case LedgerKept(command_id=command_id, problem=problem):
                self._kept(command_id, problem)
            case StepEnded():
                self._step_ended(given)
            case WorkersRequested(keys=keys):
                self.workers.request(keys)
            case WorkerForked(key=key, pid=pid):
                self.workers.forked(key, pid)
            case WorkerNotForked(key=key):
                self.workers.not_forked(key)
                self._workers_ended()
            case WorkerEnded(key=key, completed_step=completed_step, is_kept=is_kept):
                if self.workers.ended(key, completed_step, is_kept=is_kept):
                    # Before the stops that wait for it are answered.
                    is_last = self.workers.is_over(key.job_id, key.attempt)
                    self._actions.append(ReportEnd(key=key, is_last=is_last))
                    if is_last:
                        self._actions += self.loaders.over(AttemptKey(key.job_id, key.attempt))
                    self._workers_ended()
            case KeptEnded(key=key):
                if self.workers.kept_ended(key):
                    self._workers_ended()
            case EndReported(key=key, seq=seq):
                self.workers.end_reported(key, seq)
            case _:
                assert_never(given)
        return self._take_actions()

    def let_time_pass(self, now_s: float) -> list[Action]:
        """End the waits that are over."""
        self._now_s = now_s
        for running in list(self._running.values()):
            is_over = self._running.get(running.command.command_id) is not running
            if is_over or running.deadline_s > self._now_s:
                continue
            if running.step is None:
                self._begin(running)
            else:
                self._enter_next(running)
        return self._take_actions()

    def is_under_way(self, command_id: str) -> bool:
        """Whether a command will be answered."""
        return command_id in self._running

    def wake_at(self) -> float:
        """When the first wait is over; infinite while there is none."""
        earliest_s = math.inf
        for running in self._running.values():
            earliest_s = min(earliest_s, running.deadline_s)
        return earliest_s

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # From the controller

    def _receive(self, command: Command) -> None:
        admission = self.ledger.admit(
            command.command_id, command.kind, command.job_id, command.attempt
        )
        match admission.decision:
            case Decision.RUN:
                self._running[command.command_id] = _Running(command=command)
                self._actions.append(KeepLedger(command_id=command.command_id))
            case Decision.RUNNING:
                pass
            case Decision.ANSWERED | Decision.STALE:
                assert admission.result is not None
                self._actions.append(Answer(command=command, result=admission.result))
            case _:
                assert_never(admission.decision)

    def _kept(self, command_id: str, problem: str) -> None:
        running = self._running[command_id]
        command = running.command
        if running.is_overtaken:
            self._finish(running, _overtaken(command))
        elif problem and command.kind is CommandKind.START:
            refused = Result(ok=False, detail=problem, error_kind=ErrorKind.RESOURCE)
            self._finish(running, refused)
        else:
            self._begin(running)

    def _begin(self, running: _Running) -> None:
        command = running.command
        if command.kind in (CommandKind.STOP, CommandKind.FORGET):
            self._overtake(command.job_id, command.attempt)
        elif command.kind in _OVERTAKEN and command.job_id:
            # A spare's own checks end where a job takes it.
            self._overtake("", command.attempt)
        running.num_tries += 1
        running.left = iter(STEPS[command.kind])
        self._enter_next(running)

    def _overtake(self, job_id: str, attempt: int) -> None:
        """End starts and suites of an attempt, and of older ones, that are still under way."""
        for running in list(self._running.values()):
            command = running.command
            if (
                command.kind not in _OVERTAKEN
                or command.job_id != job_id
                or command.attempt > attempt
                or running.is_overtaken
            ):
                continue
            running.is_overtaken = True
            if running.is_waiting_for_workers:
                self._finish(running, _overtaken(command))
            elif running.step is not None:
                self._actions.append(CancelStep(command_id=command.command_id, step=running.step))

    # Steps

    def _enter_next(self, running: _Running) -> None:
        """Begin the next step; one that has nothing to do is over at once."""
        running.deadline_s = math.inf
        for step in running.left:
            running.step = step
            if self._enter(running, step):
                return
        self._finish(running, Result(ok=True, completed_step=_completed_step(running)))

    def _enter(self, running: _Running, step: Step) -> bool:
        """Begin a step; whether something must happen before the next one."""
        command = running.command
        match step:
            case Step.STACKS if not command.capture_stacks:
                return False
            case Step.LEAVE if command.graceful or not command.keep:
                return False
            case Step.ASK if not command.graceful:
                return False
            case _ if not steps.is_needed(step, running.facts):
                return False
            case Step.LEAVE | Step.ASK | Step.KILL:
                return self._signal(running, step)
            case Step.DATA_LOADER:
                # Ranks may have ended by now.
                if not self.workers.is_over(command.job_id, command.attempt):
                    key = AttemptKey(command.job_id, command.attempt)
                    self._actions += self.loaders.begin(key)
                return False
            case Step.FORGET_WORKERS:
                is_start = command.kind is CommandKind.START
                below_attempt = command.attempt if is_start else None
                dead = self.workers.forget_dead(command.job_id, below_attempt=below_attempt)
                if dead:
                    self._actions.append(ForgetWorkers(keys=tuple(dead)))
                return False
            case _:
                self._actions.append(RunStep(command_id=command.command_id, step=step))
                return True

    def _signal(self, running: _Running, step: Step) -> bool:
        command = running.command
        if not running.targets:
            match command.kind:
                case CommandKind.START:
                    running.targets = self.workers.in_the_way_of(command.job_id, command.attempt)
                case CommandKind.SUITE:
                    running.targets = self.workers.kept()
                case _:
                    running.targets = self.workers.up_to(command.job_id, command.attempt)
        alive = running.alive
        if not alive:
            return False
        limits_s = {Step.LEAVE: self._limits.leave_s, Step.ASK: command.timeout_s}
        within_s = limits_s.get(step, self._limits.kill_s)
        running.deadline_s = self._now_s + within_s
        keys = tuple(worker.key for worker in alive)
        lives_on = step is Step.ASK and command.keep
        signal = Signal.LEAVE_AFTER_STEP if lives_on else _SIGNALS[step]
        self._actions.append(SignalWorkers(command_id=command.command_id, keys=keys, signal=signal))
        return True

    def _step_ended(self, ended: StepEnded) -> None:
        running = self._running.get(ended.command_id)
        if running is None or running.step is not ended.step:
            return
        if running.is_overtaken:
            self._finish(running, _overtaken(running.command))
        elif ended.failure is not None:
            self._failed(running, ended.failure, is_retryable=ended.is_retryable)
        elif ended.step is Step.LEFTOVERS and running.alive:
            self._failed(running, self._staying(running), is_retryable=True)
        else:
            running.facts = ended.found or running.facts
            self._enter_next(running)

    def _failed(self, running: _Running, failure: Result, *, is_retryable: bool) -> None:
        is_forget = running.command.kind is CommandKind.FORGET
        if not is_forget or not is_retryable or running.num_tries >= FORGET_TRIES:
            self._finish(running, failure)
            return
        running.step, running.targets = None, ()
        running.deadline_s = self._now_s + FORGET_PAUSE_S

    def _staying(self, running: _Running) -> Result:
        named = ", ".join(f"rank {worker.key.rank} (pid {worker.pid})" for worker in running.alive)
        detail = (
            f"job {running.command.job_id}: still there {self._limits.kill_s:.0f} s "
            f"after SIGKILL: {named}"
        )
        return Result(ok=False, detail=detail, error_kind=ErrorKind.INTERNAL)

    def _finish(self, running: _Running, result: Result) -> None:
        command = running.command
        del self._running[command.command_id]
        if running.is_own:
            if not result.ok:
                self._actions.append(StopFailed(detail=result.detail))
            return
        self.ledger.finish(command.command_id, result)
        self._actions += [KeepLedger(), Answer(command=command, result=result)]

    # What happens meanwhile

    def _workers_ended(self) -> None:
        for running in list(self._running.values()):
            if running.is_waiting_for_workers and not running.alive:
                self._enter_next(running)

    def give_up_workers(self, now_s: float) -> list[Action]:
        """Stop every job's workers: there has been no controller for too long."""
        self._now_s = now_s
        newest: dict[str, int] = {}
        attempts = [(key.job_id, key.attempt) for key in self.workers.alive()]
        attempts += [
            (running.command.job_id, running.command.attempt)
            for running in self._running.values()
            if running.command.kind is CommandKind.START
        ]
        for job_id, attempt in attempts:
            newest[job_id] = max(newest.get(job_id, 0), attempt)
        for job_id, attempt in newest.items():
            self.ledger.stop_attempt(job_id, attempt)
        self._actions.append(KeepLedger())
        for job_id, attempt in newest.items():
            self._num_own_stops += 1
            stop = Command(
                command_id=f"own-stop-{self._num_own_stops}",
                kind=CommandKind.STOP,
                job_id=job_id,
                attempt=attempt,
                graceful=True,
                timeout_s=self._limits.absence_stop_s,
            )
            running = _Running(command=stop, is_own=True)
            self._running[stop.command_id] = running
            self._begin(running)
        return self._take_actions()


def _completed_step(running: _Running) -> int:
    """The last step that any rank of a stopped attempt completed; -1 before the first."""
    command = running.command
    if command.kind is not CommandKind.STOP:
        return -1
    return max(
        (each.completed_step for each in running.targets if each.key.attempt == command.attempt),
        default=-1,
    )


def _overtaken(command: Command) -> Result:
    what = f"job {command.job_id} attempt {command.attempt}: stopped"
    if not command.job_id:
        what = "a job took the node"
    return Result(ok=False, detail=f"{what} before this was done", error_kind=ErrorKind.STALE)
