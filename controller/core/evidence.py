"""The signs of one fault, kept within bounds without losing those that decide.

An incident's record is written anew with every change, so what a thousand ranks say
at once must not all stay in it; and what one node says alone must never be crowded out.
"""

from __future__ import annotations

from collections import Counter

from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import Cause, EvidenceKind
from outlast.failures import FailureClass
from outlast.ids import NodeId

# Fingerprints of a start that took longer than recovery.first_step_timeout_s, and of a step that
# took longer than recovery.hang_timeout_s.
NO_FIRST_STEP_YET = "no first step in time"
NO_STEP_IN_TIME = "no step in time"
# Of one kind and class: connections that a thousand ranks lost leave room for the one that failed.
MAX_ALIKE = 64
# One of them is up to 16 kB.
MAX_TRACEBACKS = 4
# They come once per rank or per upload, and a few say as much as all. Any other kind decides about
# its node, so the first sign of each node is always taken in.
_COMES_IN_NUMBERS = (EvidenceKind.WORKER_EXIT, EvidenceKind.CHECKPOINT, EvidenceKind.STACKS)


def with_sign(evidence: tuple[Evidence, ...], sign: Evidence) -> tuple[Evidence, ...]:
    """The evidence and one more sign; unchanged when that says nothing new."""
    if sign in evidence or _is_one_too_many(evidence, sign):
        return evidence
    known = (*evidence, sign)
    if not sign.traceback and sign.kind is not EvidenceKind.STALLED:
        # It changes nothing in who keeps one; thousands of nodes may be lost at once.
        return known
    return _with_few_tracebacks(known)


def nodes_with_odd_stacks(evidence: tuple[Evidence, ...]) -> tuple[NodeId, ...]:
    """Nodes of ranks whose stacks differ from those of most ranks.

    In a hang most ranks wait at the same place, and the one that they wait for does not.
    Empty when no stack is the usual one.
    """
    stacks = [
        item for item in evidence if item.kind is EvidenceKind.STACKS and item.rank is not None
    ]
    counts = Counter(item.fingerprint for item in stacks)
    usual, most = next(iter(counts.most_common(1)), ("", 0))
    if 2 * most <= len(stacks):
        return ()
    odd = [item.node for item in stacks if item.fingerprint != usual and item.node is not None]
    return tuple(dict.fromkeys(odd))


def _is_one_too_many(evidence: tuple[Evidence, ...], sign: Evidence) -> bool:
    alike = [item for item in evidence if _group(item) == _group(sign)]
    if len(alike) < MAX_ALIKE:
        return False
    if sign.kind is EvidenceKind.STACKS and len(alike) < 2 * MAX_ALIKE:
        # Ranks that wait are alike; the one that they wait for is not, or is blamed already.
        is_blamed = any(
            (item.kind, item.rank) == (EvidenceKind.STALLED, sign.rank) for item in evidence
        )
        if is_blamed or all(item.fingerprint != sign.fingerprint for item in alike):
            return False
    return sign.kind in _COMES_IN_NUMBERS or any(item.node == sign.node for item in alike)


def _group(item: Evidence) -> tuple[EvidenceKind, FailureClass, Cause | None]:
    return item.kind, item.fault_class, item.detected


def _with_few_tracebacks(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """One traceback for each of the first failures that differ.

    The failure that the others followed from (`verdict.first_failure`) keeps its own, and so
    do the ranks that a hang is blamed on: theirs come before those of ranks that wait.
    """
    blamed = {item.rank for item in evidence if item.kind is EvidenceKind.STALLED}

    def order(item: Evidence) -> tuple[bool, bool, float]:
        only_waits = item.kind is EvidenceKind.STACKS and item.rank not in blamed
        return item.is_cascade, only_waits, item.at_s

    kept: dict[tuple[FailureClass, str], Evidence] = {}
    for item in sorted(evidence, key=order):
        if item.traceback and len(kept) < MAX_TRACEBACKS:
            kept.setdefault((item.fault_class, item.fingerprint), item)
    holders = tuple(kept.values())
    return tuple(
        item if not item.traceback or item in holders else replace(item, traceback="")
        for item in evidence
    )
