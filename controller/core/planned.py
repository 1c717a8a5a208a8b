"""The verdict on a stop that was planned, and that looked like a fault at first."""

from __future__ import annotations

from controller.core.records import Action, Cause, EvidenceKind
from controller.core.verdict import Facts, Verdict, is_follower


def left_in_order(facts: Facts) -> Verdict | None:
    """Ranks lost their peers because an agent elsewhere was stopped in order, and nothing else."""
    signs = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    gone = [item for item in signs if item.kind is EvidenceKind.NODE_LEFT]
    if not gone or not all(item in gone or is_follower(item) for item in signs):
        return None
    return Verdict(
        action=Action.RESTART_IN_PLACE,
        cause=Cause.NODE_LEFT,
        reason=f"{'; '.join(item.detail for item in gone[:4])}: no fault; the job continues when "
        "its nodes are connected again",
        spends_retry=False,
    )
