"""What the journal keeps of a fault: its signs, its phases, and what was done about it."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.states import IncidentState, JobState
from outlast.failures import FailureClass
from outlast.ids import Attempt, IncidentId, JobId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One sign of a fault, as it was seen where it happened."""

    kind: EvidenceKind
    node: NodeId | None
    rank: int | None
    detail: str
    at_s: float
    # Of an exit or a refused start.
    fault_class: FailureClass = FailureClass.NONE
    # What a detector found, of kind DETECTED only.
    detected: Cause | None = None
    fingerprint: str = ""
    # Of the first failures that differ; see `evidence`.
    traceback: str = ""
    # How many nodes it is about; where it is more than one, `node` is at most the first of them.
    num_nodes: int = 1
    # Of a rank's end, as Python counts it: a signal is negative.
    exit_code: int | None = None

    @property
    def is_cascade(self) -> bool:
        """Whether a rank says no more than that it lost another one."""
        return self.fault_class is FailureClass.CASCADE


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """A phase of an incident and when it began."""

    # The name that people and metrics see; nothing is decided or computed from it.
    phase: str
    at_s: float
    detail: str = ""
    # The state that the job entered then; None for a line that says something else.
    state: JobState | None = None
    # Then it was decided what to do.
    is_verdict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """A fault from its first sign until training is past it again."""

    incident: IncidentId
    job: JobId
    attempt: Attempt
    state: IncidentState
    opened_s: float
    # When the fault happened: the earliest evidence.
    fault_s: float
    fault_step: int
    # How long the job had been starting or running, whichever the fault ended.
    ran_s: float = 0.0
    cause: Cause = Cause.UNKNOWN
    action: Action | None = None
    reason: str = ""
    culprits: tuple[NodeId, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    # Nodes whose checks after the fault have ended, with their verdict.
    findings: tuple[tuple[NodeId, str], ...] = ()
    # The search for what is at fault, "" while none was wanted, and whether it has ended.
    search: str = ""
    is_searched: bool = False
    # What it found: worst figure by node against its yardstick, and links that are bad.
    figures: tuple[tuple[NodeId, float], ...] = ()
    bad_links: tuple[tuple[NodeId, NodeId], ...] = ()
    # Nodes whose results differ in bits from what is right.
    corrupt: tuple[NodeId, ...] = ()
    resumed_step: int | None = None
    recovered_s: float | None = None
    closed_s: float | None = None
    # How often a detector found it, and when last.
    count: int = 1
    last_s: float | None = None

    @property
    def stops_job(self) -> bool:
        """Whether workers were stopped for it; else it was opened beside training."""
        is_beside = self.action is None and self.state in (IncidentState.OPEN, IncidentState.CLOSED)
        return not is_beside or any(entry.state is not None for entry in self.timeline)

    @property
    def is_note(self) -> bool:
        """Whether a detector only logs it: nothing was stopped. Memory that changed by itself is
        no guess of a detector."""
        first = self.evidence[0].kind if self.evidence else None
        is_guess = first is EvidenceKind.DETECTED and self.cause is not Cause.SILENT_CORRUPTION
        return is_guess and not self.stops_job
