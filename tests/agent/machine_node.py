"""A node around the machine of an agent: what it asks for is done as far as a test says."""

from __future__ import annotations

from controller.agent.core.actions import (
    Action,
    Answer,
    CancelStep,
    ForgetWorkers,
    KeepLedger,
    ReportDataLoader,
    ReportEnd,
    RunStep,
    Signal,
    SignalWorkers,
    StartDataLoader,
    StopDataLoader,
    StopFailed,
)
from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.commands import CommandLimits
from controller.agent.core.inputs import (
    AbsenceLimitSet,
    Command,
    CommandReceived,
    EndReported,
    Input,
    LedgerKept,
    StepEnded,
    TimePassed,
    Welcomed,
    WorkerEnded,
    WorkerForked,
    WorkersRequested,
)
from controller.agent.core.ledger import CommandKind, CommandLedger, Result
from controller.agent.core.machine import AgentMachine
from controller.agent.core.steps import StartFacts, Step
from controller.agent.core.workers import WorkerKey
from outlast.failures import ErrorKind

KILL_S = 10.0
ABSENCE_S = 60.0
BROKEN = Result(ok=False, detail="no", error_kind=ErrorKind.RESOURCE)


def command(
    kind: CommandKind, attempt: int = 1, command_id: str = "", **facts: float | bool
) -> Command:
    name = command_id or f"{kind.value}-{attempt}"
    return Command(command_id=name, kind=kind, job_id="job", attempt=attempt, **facts)  # type: ignore[arg-type]


class Node:
    """What the machine asked for, done as far as a test says."""

    def __init__(self, ledger: CommandLedger | None = None) -> None:
        self.now_s = 100.0
        self.machine: AgentMachine[str] = AgentMachine(
            ledger or CommandLedger(),
            EventBuffer(10),
            now_s=self.now_s,
            limits=CommandLimits(kill_s=KILL_S, absence_stop_s=30.0),
        )
        self.give(AbsenceLimitSet(limit_s=ABSENCE_S))
        self.give(Welcomed())
        self.disk_is_full = False
        # What preflight finds, and the steps that have ended.
        self.facts = StartFacts(has_strays=False, keeps_copies=False)
        self.done: list[Step] = []
        self.steps: dict[str, Step] = {}
        self.cancelled: list[str] = []
        self.answers: list[Answer] = []
        self.signals: list[tuple[Signal, tuple[WorkerKey, ...]]] = []
        self.forgotten: list[WorkerKey] = []
        self.own_failures: list[str] = []
        self.of_loaders: list[Action] = []
        # Ends that were reported, and those that came with what the attempt left.
        self.ended: list[WorkerKey] = []
        self.last_ended: list[WorkerKey] = []

    def give(self, given: Input) -> list[Action]:
        actions = self.machine.handle(given, self.now_s)
        for action in actions:
            match action:
                case KeepLedger(command_id=""):
                    pass
                case KeepLedger(command_id=command_id):
                    problem = "disk full" if self.disk_is_full else ""
                    self.give(LedgerKept(command_id=command_id, problem=problem))
                case RunStep(command_id=command_id, step=step):
                    assert command_id not in self.steps, "two steps of a command at once"
                    self.steps[command_id] = step
                case CancelStep(command_id=command_id, step=step):
                    assert self.steps[command_id] is step
                    self.cancelled.append(command_id)
                case SignalWorkers(keys=keys, signal=signal):
                    self.signals.append((signal, keys))
                case ReportEnd(key=key, is_last=is_last):
                    assert key not in self.ended, "an end is reported again"
                    self.ended.append(key)
                    self.last_ended += [key] if is_last else []
                    seq = self.machine.line.add(f"{key} ended", Weight.LASTING)
                    self.give(EndReported(key=key, seq=seq))
                case ForgetWorkers(keys=keys):
                    self.forgotten += keys
                case Answer():
                    self.answers.append(action)
                case StartDataLoader() | StopDataLoader() | ReportDataLoader():
                    self.of_loaders.append(action)
                case StopFailed(detail=detail):
                    self.own_failures.append(detail)
        return actions

    def receive(self, what: Command) -> None:
        self.give(CommandReceived(command=what))

    def end_step(
        self, command_id: str, failure: Result | None = None, *, again: bool = False
    ) -> None:
        step = self.steps.pop(command_id)
        found = self.facts if step is Step.PREFLIGHT and failure is None else None
        self.done.append(step)
        self.give(
            StepEnded(
                command_id=command_id,
                step=step,
                failure=failure,
                is_retryable=again,
                found=found,
            )
        )

    def run_to(self, command_id: str, step: Step) -> None:
        while self.steps[command_id] is not step:
            self.end_step(command_id)

    def start(self, attempt: int = 1, ranks: int = 2) -> list[WorkerKey]:
        """Start an attempt, whole."""
        name = f"start-{attempt}"
        self.receive(command(CommandKind.START, attempt))
        self.run_to(name, Step.FORK)
        keys = [WorkerKey("job", attempt, rank) for rank in range(ranks)]
        self.give(WorkersRequested(keys=tuple(keys)))
        for key in keys:
            self.give(WorkerForked(key=key, pid=4_000 + key.rank))
        self.end_step(name)
        self.end_step(name)
        assert self.answers.pop().result.ok
        return keys

    def pass_time(self, s: float) -> None:
        self.now_s += s
        self.give(TimePassed())

    def end(self, *keys: WorkerKey, step: int = -1) -> None:
        for key in keys:
            self.give(WorkerEnded(key=key, completed_step=step))
