"""What the machine of an agent is given. Times come beside them, as `now_s`."""

from __future__ import annotations

from dataclasses import dataclass

from controller.agent.core.ledger import CommandKind, Result
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import StartFacts, Step
from controller.agent.core.workers import WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The fields of a command that the machine decides by."""

    command_id: str
    kind: CommandKind
    job_id: str
    attempt: int
    # Of a stop: workers get SIGTERM and this long to end, before SIGKILL.
    graceful: bool = False
    timeout_s: float = 0.0
    # Of a stop: collect the stacks of the workers first.
    capture_stacks: bool = False
    # Of a stop: workers that leave their attempt in time live on.
    keep: bool = False
    # Of a start: the ranks that it starts here.
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    """From the controller, be it new, repeated or stale."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerKept:
    """The answer to `KeepLedger` of a command; `problem` says why it could not be written."""

    command_id: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The answer to `RunStep`, after `CancelStep` as well."""

    command_id: str
    step: Step
    # How it failed; None when it is done.
    failure: Result | None = None
    # Whether another try may succeed.
    is_retryable: bool = False
    # What `PREFLIGHT` found.
    found: StartFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersRequested:
    """These workers are about to be forked."""

    keys: tuple[WorkerKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForked:
    """There is a process."""

    key: WorkerKey
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotForked:
    """There will be no process of a worker that was requested."""

    key: WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """The process has ended. Told again, it says nothing new."""

    key: WorkerKey
    completed_step: int = -1
    # It has left its attempt; the process lives, for the next one.
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEnded:
    """The process of a worker that had left its attempt has ended, or takes part in another."""

    key: WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReported:
    """The answer to `ReportEnd`: the number of the event that says so."""

    key: WorkerKey
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderStarted:
    """There is a process that reads data for the ranks of an attempt."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderEnded:
    """It has ended without being stopped, or could not be started."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
    """The controller has taken this agent in: a session begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsenceLimitSet:
    """How long workers go on without a controller, from the next absence on."""

    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost:
    """There is no session any more, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsAcknowledged:
    """The controller has all events up to this one."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """It is later; see `wake_at`."""


CommandInput = (
    CommandReceived
    | LedgerKept
    | StepEnded
    | WorkersRequested
    | WorkerForked
    | WorkerNotForked
    | WorkerEnded
    | KeptEnded
    | EndReported
)
Input = (
    CommandInput
    | DataLoaderStarted
    | DataLoaderEnded
    | Welcomed
    | AbsenceLimitSet
    | SessionLost
    | EventsAcknowledged
    | TimePassed
)
