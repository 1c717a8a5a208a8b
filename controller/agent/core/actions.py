"""What the machine of an agent wants done, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controller.agent.core.inputs import Command
from controller.agent.core.ledger import Result
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import Step
from controller.agent.core.workers import WorkerKey


class Signal(StrEnum):
    """What a worker is sent."""

    STOP = "stop"
    """SIGTERM: end after the next step."""
    LEAVE = "leave"
    """A message: give the attempt up, and live on."""
    LEAVE_AFTER_STEP = "leave after step"
    """The same, after the next step."""
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLedger:
    """Write the ledger to disk. With a command, `LedgerKept` answers before it begins."""

    command_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Do a step of a command; `StepEnded` answers."""

    command_id: str
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelStep:
    """Give up the step that runs; `StepEnded` answers."""

    command_id: str
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalWorkers:
    """Signal these workers, now or as soon as there is a process; `WorkerEnded` answers."""

    command_id: str
    keys: tuple[WorkerKey, ...]
    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEnd:
    """Report what a worker completed and did not report, then its end; `EndReported` answers."""

    key: WorkerKey
    # No other worker of its attempt runs here: what the attempt left is reported as well.
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetWorkers:
    """Drop what is kept of these dead workers."""

    keys: tuple[WorkerKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Report the result of a command to the controller."""

    command: Command
    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFailed:
    """Workers that this agent stops on its own account did not end."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEvents:
    """Send what was not sent in this session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpWorkers:
    """There has been no controller for so long that all workers are stopped."""

    absent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDataLoader:
    """Start the process that reads data for an attempt's ranks here; `DataLoaderStarted` or
    `DataLoaderEnded` answers."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDataLoader:
    """End that process, if it runs, and let no rank wait for it any more. Nothing answers."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDataLoader:
    """Report that it has ended and what comes of it; without a problem: that it is well again."""

    key: AttemptKey
    problem: str


Action = (
    KeepLedger
    | RunStep
    | CancelStep
    | SignalWorkers
    | ReportEnd
    | ForgetWorkers
    | Answer
    | StopFailed
    | SendEvents
    | GiveUpWorkers
    | StartDataLoader
    | StopDataLoader
    | ReportDataLoader
)
