"""What the evidence of a fault says: what came first, whose it is, and in which words."""

from __future__ import annotations

from collections.abc import Iterator

from controller.core import causes, program_error
from controller.core.evidence import nodes_with_odd_stacks
from controller.core.incident_record import Evidence
from controller.core.kinds import Cause, EvidenceKind
from controller.core.verdict import PolicyInput, first_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId


def initiating(facts: PolicyInput) -> Evidence | None:
    """What everything else followed from, when that is the job's own processes."""
    failure = first_failure(facts.evidence)
    stuck = any(item.kind is EvidenceKind.STALLED for item in facts.evidence)
    if failure is None or (failure.is_cascade and stuck):
        # Ranks lose each other while those of a job that hangs are stopped.
        return next(_stuck_program(facts.evidence), None)
    return failure


def culprits(facts: PolicyInput) -> tuple[NodeId, ...]:
    """The nodes that the evidence speaks against; none where it is the program's doing."""
    if next(_stuck_program(facts.evidence), None):
        return ()
    stalled = [item for item in facts.evidence if item.kind is EvidenceKind.STALLED]
    if any(item.num_nodes > 1 for item in stalled):
        # All of them stand alike, so other stacks elsewhere are no sign either.
        return ()
    failure = first_failure(facts.evidence)
    if failure is not None and failure.fault_class in causes.WITHOUT_CULPRIT:
        return ()
    # Every node has stacks, and who lost a peer did nothing: neither is a sign against a node.
    others = [
        item
        for item in facts.evidence
        if item.kind is not EvidenceKind.STACKS and not item.is_cascade
    ]
    is_own = failure is not None and not failure.is_cascade
    named = unique(stalled or ([failure] if failure is not None and is_own else others))
    return named or nodes_with_odd_stacks(facts.evidence)


def is_wide_hang_again(facts: PolicyInput) -> bool:
    """Whether most nodes hang as in the fault before: nobody is remembered as a suspect of that."""
    return any(
        item.num_nodes > 1 and item.fingerprint == facts.last_fingerprint != ""
        for item in facts.evidence
        if item.kind is EvidenceKind.STALLED
    )


def has_suspects(facts: PolicyInput) -> bool:
    """Whether some node may be at fault: those that are blamed, or any of those that hang."""
    stalled = (item for item in facts.evidence if item.kind is EvidenceKind.STALLED)
    is_program = next(_stuck_program(facts.evidence), None) is not None
    return bool(culprits(facts)) or (not is_program and any(i.num_nodes > 1 for i in stalled))


def cause(facts: PolicyInput) -> Cause:
    """What kind of fault it is."""
    failure = initiating(facts)
    if failure is not None and failure.kind is EvidenceKind.WORKERS_MISSING:
        return Cause.WORKERS_MISSING
    if failure is not None:
        return causes.cause_of(failure.fault_class)
    sign = detected(facts.evidence)
    if sign is not None:
        return sign.detected or Cause.UNKNOWN
    slow = (EvidenceKind.STALLED, EvidenceKind.NO_FIRST_STEP)
    if any(item.kind in slow for item in facts.evidence):
        return Cause.HANG
    if any(item.kind is EvidenceKind.START_FAILED for item in facts.evidence):
        return Cause.NODE_UNHEALTHY
    return Cause.UNKNOWN


def detected(evidence: tuple[Evidence, ...]) -> Evidence | None:
    """The sign of a detector that acts, if there is one."""
    return next((item for item in evidence if item.kind is EvidenceKind.DETECTED), None)


def describe(facts: PolicyInput, failure: Evidence | None) -> str:
    """What happened, for a reason that people read."""
    if failure is not None and failure.kind is EvidenceKind.WORKERS_MISSING:
        return failure.detail
    if failure is not None and failure.is_cascade:
        first = f"rank {failure.rank} on {failure.node}: {program_error.plain(failure.detail)}"
        return f"ranks lost each other ({first}), and what failed first is not known"
    if failure is not None:
        return (
            f"rank {failure.rank} on {failure.node} failed: {program_error.plain(failure.detail)}"
        )
    # Stacks come after the sign that had them taken; they are read elsewhere.
    signs = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    return "; ".join(item.detail for item in signs[:2])


def lacks_storage(item: Evidence) -> bool:
    """Whether it says that storage did not answer, or did not take the last checkpoint."""
    if item.kind is EvidenceKind.START_FAILED:
        return item.fault_class is FailureClass.STORAGE
    return item.fault_class is FailureClass.LAST_CHECKPOINT


def unique(evidence: list[Evidence]) -> tuple[NodeId, ...]:
    """The nodes of this evidence, each once, in its order."""
    return tuple(dict.fromkeys(item.node for item in evidence if item.node is not None))


def _stuck_program(evidence: tuple[Evidence, ...]) -> Iterator[Evidence]:
    """Signs of a hang that the program itself makes: another node would do no better."""
    return (
        item
        for item in evidence
        if item.kind is EvidenceKind.STALLED and item.fault_class is FailureClass.USER_ERROR
    )
