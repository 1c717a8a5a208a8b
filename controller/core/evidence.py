"""The signs of one fault, kept within bounds without losing those that decide.

An incident's record is written anew with every change, so what a thousand ranks say
at once must not all stay in it; and what one node says alone must never be crowded out.
"""

from __future__ import annotations

from dataclasses import replace

from controller.core.records import Evidence, EvidenceKind

# Of one kind and class: connections that a thousand ranks lost leave room for the one that failed.
MAX_ALIKE = 64
# One of them is up to 16 kB.
MAX_TRACEBACKS = 4
# They come once per rank or per upload, and a few say as much as all. Any other kind decides about
# its node, so the first sign of each node is always taken in.
_COMES_IN_NUMBERS = (EvidenceKind.WORKER_EXIT, EvidenceKind.CHECKPOINT)


def with_sign(evidence: tuple[Evidence, ...], sign: Evidence) -> tuple[Evidence, ...]:
    """The evidence and one more sign; unchanged when that says nothing new."""
    if sign in evidence or _is_one_too_many(evidence, sign):
        return evidence
    return _with_few_tracebacks((*evidence, sign))


def _is_one_too_many(evidence: tuple[Evidence, ...], sign: Evidence) -> bool:
    alike = [
        item for item in evidence if (item.kind, item.fault_class) == (sign.kind, sign.fault_class)
    ]
    if len(alike) < MAX_ALIKE:
        return False
    return sign.kind in _COMES_IN_NUMBERS or any(item.node == sign.node for item in alike)


def _with_few_tracebacks(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """One traceback for each of the first failures that differ.

    The failure that the others followed from (`policy.root_failure`) keeps its own.
    """
    kept: dict[tuple[str, str], Evidence] = {}
    for item in sorted(evidence, key=lambda item: (item.is_cascade, item.at_s)):
        if item.traceback and len(kept) < MAX_TRACEBACKS:
            kept.setdefault((item.fault_class, item.fingerprint), item)
    holders = tuple(kept.values())
    return tuple(
        item if not item.traceback or item in holders else replace(item, traceback="")
        for item in evidence
    )
