"""Verdicts on what looks like a fault and is none of any node: planned stops, and lost starts."""

from __future__ import annotations

from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.verdict import PolicyInput, PolicyVerdict, is_follower


def left_in_order(facts: PolicyInput) -> PolicyVerdict | None:
    """Ranks lost their peers because an agent elsewhere was stopped in order, and nothing else."""
    signs = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    gone = [item for item in signs if item.kind is EvidenceKind.NODE_LEFT]
    if not gone or not all(item in gone or is_follower(item) for item in signs):
        return None
    return PolicyVerdict(
        action=Action.RESTART_IN_PLACE,
        cause=Cause.NODE_LEFT,
        reason=f"{'; '.join(item.detail for item in gone[:4])}: no fault; the job continues when "
        "its nodes are connected again",
        spends_retry=False,
    )


def start_lost(facts: PolicyInput) -> PolicyVerdict | None:
    """An order to start went to an agent that was gone: the same is tried with the present one.

    It spends a retry, so that a start which ends its agent is not tried for ever.
    """
    signs = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    lost = [item for item in signs if item.kind is EvidenceKind.START_LOST]
    if not lost or facts.retry_left <= 0:
        return None
    if not all(item in lost or is_follower(item) for item in signs):
        return None
    return PolicyVerdict(
        action=Action.RESTART_IN_PLACE,
        cause=Cause.WORKERS_MISSING,
        reason=f"{'; '.join(item.detail for item in lost[:4])}; starting again, no node blamed",
    )
