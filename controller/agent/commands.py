"""Carries out what the machine of this agent decides.

Every step of a command is a task of its own, so that a stop is never behind a start
that waits for something. The answer to a command is an event, kept until acknowledged.

What does not belong here: which step comes next, and what a command may not do
(`core/commands`); how a step is done (`order_steps`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

from controller.agent import wire
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
    AbsenceLimitSet,
    Command,
    CommandReceived,
    DataLoaderEnded,
    DataLoaderStarted,
    EndReported,
    EventsAcknowledged,
    Input,
    KeptEnded,
    LedgerKept,
    SessionLost,
    StepEnded,
    TimePassed,
    Welcomed,
    WorkerEnded,
    WorkerForked,
    WorkerNotForked,
    WorkersRequested,
)
from controller.agent.core.ledger import CommandKind, CommandLedger, Result
from controller.agent.core.line import DEFAULT_ABSENCE_LIMIT_S
from controller.agent.core.machine import AgentMachine
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import Step
from controller.agent.diagnostics import SuiteError
from controller.agent.memory.uploads import PushError
from controller.agent.observe.reporter import Emit
from controller.agent.order_steps import Order, OrderSteps, Parts
from controller.agent.workers import launch
from controller.agent.workers.script_store import StoreError
from controller.agent.workers.standby_events import StandbyError
from controller.agent.workers.worker import Worker
from outlast.clock import node_time_ns, node_time_s
from outlast.errors import RetryableError
from outlast.failures import ErrorKind
from outlast.v1 import agents_pb2
from outlast.worker_contract import STOP_SIGNAL

logger = logging.getLogger(__name__)

_SIGNALS = {Signal.STOP: STOP_SIGNAL, Signal.KILL: signal.SIGKILL}


class Commands:
    """The machine of commands, over the processes and files of this node."""

    def __init__(
        self,
        parts: Parts,
        machine: AgentMachine[agents_pb2.AgentEvent],
        *,
        emit: Emit,
        report_end: Callable[[Worker, bool], int],
        send_events: Callable[[], None],
        save_ledger: Callable[[CommandLedger], None],
    ) -> None:
        self._parts = parts
        self._steps = OrderSteps(parts)
        self._machine = machine
        self._emit = emit
        self._report_end = report_end
        self._send_events = send_events
        self._save_ledger = save_ledger
        self._orders: dict[str, Order] = {}
        self._tasks: dict[str, asyncio.Task[StepEnded]] = {}
        self._driver = Driver(
            machine.handle, self._perform_safely, lambda: asyncio.get_running_loop().time()
        )
        self._timer: asyncio.TimerHandle | None = None
        self._wake_s: float | None = None
        self._is_closing = False

    def receive(self, command: agents_pb2.Command) -> None:
        """Take a command from the controller, be it new, repeated or stale."""
        kind = wire.kind_of(command)
        if kind is None:
            logger.error("command %s: of a kind that this agent does not know", command.command_id)
            refused = Result(
                ok=False,
                detail="the agent is older than the controller and does not know this command",
                error_kind=ErrorKind.INTERNAL,
            )
            self._answer(wire.command_of(command, CommandKind.SUITE), refused)
            return
        order = Order(command=command, received_ns=node_time_ns())
        self._orders.setdefault(command.command_id, order)
        self._give(CommandReceived(command=wire.command_of(command, kind)))

    def begin(self) -> None:
        """Let time pass from now on."""
        self._give(TimePassed())

    def newest_attempt(self, job_id: str) -> int:
        """The newest attempt of the job that was started here; 0 when none was."""
        return self._machine.commands.ledger.fence(job_id).started

    async def close(self) -> None:
        """Drop whatever is under way: the next agent must do what this one did not."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The session

    def welcomed(self, welcome: agents_pb2.Welcome) -> None:
        """A session begins, or the controller changes the limit."""
        limit_s = welcome.controller_absence_limit_s or DEFAULT_ABSENCE_LIMIT_S
        self._give(AbsenceLimitSet(limit_s=limit_s))
        if not self._machine.line.is_connected:
            self._give(Welcomed())

    def session_lost(self) -> None:
        """It ended."""
        self._give(SessionLost())

    def acknowledged(self, seq: int) -> None:
        """The controller has all events up to this one."""
        self._give(EventsAcknowledged(seq=seq))

    # Workers

    def workers_requested(self, workers: Iterable[Worker]) -> None:
        """These are about to be forked."""
        self._give(WorkersRequested(keys=tuple(worker.identity for worker in workers)))

    def worker_forked(self, worker: Worker) -> None:
        """There is a process."""
        assert worker.pid is not None
        self._give(WorkerForked(key=worker.identity, pid=worker.pid))

    def worker_not_forked(self, worker: Worker) -> None:
        """There will be no process."""
        self._give(WorkerNotForked(key=worker.identity))

    def worker_ended(self, worker: Worker) -> None:
        """The process has ended, and its exit says how."""
        completed_step = -1 if worker.exit is None else worker.exit.completed_step
        is_kept = worker.is_kept
        ended = WorkerEnded(key=worker.identity, completed_step=completed_step, is_kept=is_kept)
        self._give(ended)

    def kept_ended(self, worker: Worker) -> None:
        """The process of one that had left its attempt is no more, or another worker's."""
        self._give(KeptEnded(key=worker.identity))

    def data_loader_started(self, key: AttemptKey) -> None:
        """There is a process that reads data for an attempt's ranks."""
        self._give(DataLoaderStarted(key=key))

    def data_loader_ended(self, key: AttemptKey, reason: str) -> None:
        """It has ended, or there will be none."""
        self._give(DataLoaderEnded(key=key, reason=reason))

    # The machine

    def _give(self, given: Input) -> None:
        if self._is_closing:
            return
        self._driver.give(given)
        wake_s = self._machine.wake_at()
        if wake_s == self._wake_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_s = wake_s
        loop = asyncio.get_running_loop()
        self._timer = None if wake_s is None else loop.call_at(wake_s, self._wake)

    def _wake(self) -> None:
        self._wake_s = None
        self._give(TimePassed())

    def _perform_safely(self, action: Action) -> None:
        """One action that fails must not take those after it along."""
        try:
            self._perform(action)
        except Exception as error:  # noqa: BLE001  # it is logged and counted
            self._parts.mistakes.note("command", type(action).__name__, error)

    def _perform(self, action: Action) -> None:
        match action:
            case KeepLedger(command_id=command_id):
                problem = self._keep_ledger()
                if command_id:
                    self._driver.give(LedgerKept(command_id=command_id, problem=problem))
            case RunStep(command_id=command_id, step=step):
                work = self._run_step(command_id, step)
                task = asyncio.create_task(work, name=f"command-{command_id}-{step.value}")
                self._tasks[command_id] = task
                task.add_done_callback(partial(self._step_ended, command_id, step))
            case CancelStep(command_id=command_id):
                self._tasks[command_id].cancel()
            case SignalWorkers(keys=keys, signal=Signal.LEAVE | Signal.LEAVE_AFTER_STEP as number):
                after_step = number is Signal.LEAVE_AFTER_STEP
                self._parts.supervisor.ask_to_leave(keys, after_step=after_step)
            case SignalWorkers(keys=keys, signal=number):
                self._parts.supervisor.signal(keys, _SIGNALS[number])
            case ReportEnd(key=key, is_last=is_last):
                worker = self._parts.supervisor.find(key)
                if worker is not None:
                    seq = self._report_end(worker, is_last)
                    self._driver.give(EndReported(key=key, seq=seq))
            case ForgetWorkers(keys=keys):
                self._parts.supervisor.forget(keys)
            case Answer(command=command, result=result):
                self._answer(command, result)
            case StopFailed(detail=detail):
                logger.error("%s", detail)
            case SendEvents():
                self._send_events()
            case GiveUpWorkers(absent_s=absent_s):
                logger.error(
                    "no controller for %.0f s: node=%s workers are stopped",
                    absent_s,
                    self._parts.config.node,
                )
            case StartDataLoader(key=attempt):
                self._parts.data_loaders.start(attempt)
            case StopDataLoader(key=attempt):
                self._parts.data_loaders.stop(attempt)
            case ReportDataLoader(key=attempt, problem=problem):
                sign = wire.data_loader_sign(*attempt, problem, at_s=node_time_s())
                self._emit(sign, Weight.LASTING)
            case _:
                assert_never(action)

    def _keep_ledger(self) -> str:
        """Write the ledger; why that could not be done. A full disk must not end the agent."""
        try:
            self._save_ledger(self._machine.commands.ledger)
        except OSError as error:
            logger.error("commands are not kept over a restart of this agent: %s", error)
            return f"cannot write to {self._parts.config.state_dir}: is its disk full?"
        except Exception as error:  # the command goes on, or is refused; it is not left unanswered
            logger.exception("commands are not kept over a restart of this agent")
            return f"cannot write its order to disk: {error!r}"
        return ""

    async def _run_step(self, command_id: str, step: Step) -> StepEnded:
        found = None
        try:
            if step is Step.LEFTOVERS:
                # The agent's own stops come to it as well, and nobody ordered those.
                await self._steps.end_leftovers(self._orders.get(command_id))
            else:
                found = await self._steps.run(self._orders[command_id], step)
        except Exception as error:  # the controller waits for an answer
            if not isinstance(error, _EXPECTED):
                logger.exception("command %s failed", command_id)
            return StepEnded(
                command_id=command_id,
                step=step,
                failure=_failure(error),
                is_retryable=isinstance(error, OSError | RetryableError),
            )
        return StepEnded(command_id=command_id, step=step, found=found)

    def _step_ended(self, command_id: str, step: Step, task: asyncio.Task[StepEnded]) -> None:
        self._tasks.pop(command_id, None)
        if not task.cancelled():
            self._give(task.result())
        elif not self._is_closing:
            failure = Result(ok=False, detail="cancelled", error_kind=ErrorKind.INTERNAL)
            self._give(StepEnded(command_id=command_id, step=step, failure=failure))

    def _answer(self, command: Command, result: Result) -> None:
        order = self._orders.pop(command.command_id, None)
        if not result.ok:
            logger.warning(
                "command refused or failed: command=%s job=%s attempt=%d kind=%s %s",
                command.command_id,
                command.job_id,
                command.attempt,
                result.error_kind.value,
                result.detail,
            )
        event = wire.answer(
            command,
            result,
            at_s=node_time_s(),
            findings=() if order is None else order.findings,
            stacks=() if order is None else order.stacks,
        )
        self._emit(event, Weight.LASTING)


_EXPECTED = (launch.StartRefusedError, PushError, StandbyError, StoreError, SuiteError, OSError)


def _failure(error: Exception) -> Result:
    match error:
        case launch.StartRefusedError(kind=kind):
            return Result(ok=False, detail=str(error), error_kind=kind)
        case PushError() | StoreError() | OSError():
            return Result(ok=False, detail=str(error), error_kind=ErrorKind.RESOURCE)
        case StandbyError() | SuiteError():
            return Result(ok=False, detail=str(error), error_kind=ErrorKind.INTERNAL)
        case _:
            # Our own mistake: the controller must hear of it, or it would wait for ever.
            detail = f"{type(error).__name__}: {error}"
            return Result(ok=False, detail=detail, error_kind=ErrorKind.INTERNAL)
