"""Which commands were applied here, with which result.

The controller repeats a command until it sees the result, and the wire may
reorder. `admit` says what to do with one: run it, ignore it (it runs already),
answer with the stored result, or refuse it as stale. An attempt of a job is
started at most once on a node, and never after a newer one was started or after
it was stopped: that is the fence.

What does not belong here: doing what a command says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from outlast.failures import ErrorKind

# A controller repeats unanswered commands only; a few per job and attempt are ever open.
MAX_RESULTS = 1_000
MAX_FENCES = 10_000

Json = Mapping[str, object]


class CommandKind(StrEnum):
    """What a command asks for."""

    START = "start"
    STOP = "stop"
    SUITE = "suite"
    FORGET = "forget"
    PUSH = "push"


class Decision(StrEnum):
    """What to do with a command that came in."""

    RUN = "run"
    RUNNING = "running"
    ANSWERED = "answered"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended. Findings are not kept: a repeated suite answers without them."""

    ok: bool
    detail: str = ""
    error_kind: ErrorKind = ErrorKind.NONE
    completed_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The ledger's answer to a command; `result` is set unless it must run or is running."""

    decision: Decision
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Fence:
    """The newest attempts of a job that were started and stopped here; 0 is none."""

    started: int = 0
    stopped: int = 0


class CommandLedger:
    """Which commands were applied, with which result, and the fence of each job."""

    def __init__(self, *, max_results: int = MAX_RESULTS) -> None:
        self._max_results = max_results
        # Insertion order is age; the oldest are dropped at the bound.
        self._results: dict[str, Result] = {}
        self._running: dict[str, None] = {}
        self._fences: dict[str, Fence] = {}

    def admit(self, command_id: str, kind: CommandKind, job_id: str, attempt: int) -> Admission:
        """Decide what to do with a command, and raise the job's fence if it will run."""
        if command_id in self._running:
            return Admission(decision=Decision.RUNNING)
        stored = self._results.get(command_id)
        # What a job holds is freed at the next try, if not at the first.
        if stored is not None and (stored.ok or kind is not CommandKind.FORGET):
            return Admission(decision=Decision.ANSWERED, result=stored)
        if kind is CommandKind.START:
            reason = self._why_stale(job_id, attempt)
            if reason:
                stale = Result(ok=False, detail=reason, error_kind=ErrorKind.STALE)
                self._store(command_id, stale)
                return Admission(decision=Decision.STALE, result=stale)
        self._raise_fence(kind, job_id, attempt)
        self._running[command_id] = None
        return Admission(decision=Decision.RUN)

    def finish(self, command_id: str, result: Result) -> None:
        """Keep the result of a command that was admitted to run."""
        del self._running[command_id]
        self._store(command_id, result)

    def result(self, command_id: str) -> Result | None:
        """How a command ended, as far as that is kept."""
        return self._results.get(command_id)

    def fence(self, job_id: str) -> Fence:
        """The newest attempts of the job that were started and stopped here."""
        return self._fences.get(job_id, Fence())

    def stop_attempt(self, job_id: str, attempt: int) -> None:
        """Fence an attempt that the agent stops on its own account."""
        self._raise_fence(CommandKind.STOP, job_id, attempt)

    def to_json(self) -> dict[str, object]:
        """What must survive the agent. Commands that were running do not: their work is gone."""
        return {
            "version": 1,
            "results": {
                command_id: {
                    "ok": result.ok,
                    "detail": result.detail,
                    "error_kind": result.error_kind.value,
                    "completed_step": result.completed_step,
                }
                for command_id, result in self._results.items()
            },
            "fences": {
                job_id: {"started": fence.started, "stopped": fence.stopped}
                for job_id, fence in self._fences.items()
            },
        }

    @classmethod
    def from_json(cls, document: Json, *, max_results: int = MAX_RESULTS) -> CommandLedger:
        """The ledger that `to_json` described.

        Raises:
            ValueError: the document is not one of ours.
        """
        ledger = cls(max_results=max_results)
        if document.get("version") != 1:
            raise ValueError(f"command ledger: version {document.get('version')!r}, expected 1")
        for command_id, facts in _sections(document, "results"):
            ledger._results[command_id] = Result(
                ok=bool(facts.get("ok")),
                detail=str(facts.get("detail", "")),
                error_kind=ErrorKind(str(facts.get("error_kind", ""))),
                completed_step=_integer(facts, "completed_step"),
            )
        for job_id, facts in _sections(document, "fences"):
            ledger._fences[job_id] = Fence(_integer(facts, "started"), _integer(facts, "stopped"))
        return ledger

    def _why_stale(self, job_id: str, attempt: int) -> str:
        fence = self.fence(job_id)
        if attempt <= fence.stopped:
            return (
                f"job {job_id} attempt {attempt}: attempt {fence.stopped} was already stopped here"
            )
        if attempt <= fence.started:
            return (
                f"job {job_id} attempt {attempt}: attempt {fence.started} was already started here"
            )
        return ""

    def _raise_fence(self, kind: CommandKind, job_id: str, attempt: int) -> None:
        fence = self._fences.pop(job_id, Fence())
        match kind:
            case CommandKind.START:
                fence = Fence(max(fence.started, attempt), fence.stopped)
            case CommandKind.STOP | CommandKind.FORGET:
                fence = Fence(fence.started, max(fence.stopped, attempt))
            case CommandKind.SUITE | CommandKind.PUSH:
                pass
        if fence != Fence():
            self._fences[job_id] = fence
        _drop_oldest(self._fences, MAX_FENCES)

    def _store(self, command_id: str, result: Result) -> None:
        self._results[command_id] = result
        _drop_oldest(self._results, self._max_results)


def _drop_oldest(kept: dict[str, Result] | dict[str, Fence], bound: int) -> None:
    while len(kept) > bound:
        del kept[next(iter(kept))]


def _sections(document: Json, name: str) -> list[tuple[str, Json]]:
    section = document.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"command ledger: {name} is {section!r}, expected a mapping")
    for key, facts in section.items():
        if not isinstance(facts, dict):
            raise ValueError(f"command ledger: {name}.{key} is {facts!r}, expected a mapping")
    return list(section.items())


def _integer(facts: Json, name: str) -> int:
    value = facts.get(name)
    if not isinstance(value, int):
        raise ValueError(f"command ledger: {name} is {value!r}, expected an integer")
    return value
