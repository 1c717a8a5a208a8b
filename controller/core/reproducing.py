"""Verdicts on steps with a non-finite loss, or too large a one, and on bits that should be equal.

A step with a non-finite loss is done again first, because the same data on the same weights give
the same bits: what comes back is the data's, what does not is a device's. What it is done again
for, and what was learned of nodes by it, is kept by `replays`.
"""

from __future__ import annotations

from controller.core.causes import CORRUPT, NON_FINITE
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind, NonFiniteAgain, Rung
from controller.core.naming import names
from controller.core.verdict import PolicyInput, PolicyVerdict, first_failure
from outlast.skipped import StepRange

# Data are shuffled, so bad batches are not neighbours: one more, and it is the weights.
_MAX_SKIPS_IN_A_ROW = 2


def bad_step(evidence: tuple[Evidence, ...], fault_step: int) -> int | None:
    """The step with a non-finite loss, when that is what the fault is about."""
    failure = first_failure(evidence)
    # The weights were not touched: every rank had completed the step before.
    is_bad = failure is not None and failure.fault_class in NON_FINITE and fault_step >= 0
    return fault_step + 1 if is_bad else None


def _other_bits(facts: PolicyInput) -> PolicyVerdict | None:
    """Two replicas computed the same part of a step, and their bits differ."""
    failure = first_failure(facts.evidence)
    if failure is None or failure.fault_class not in CORRUPT or facts.retry_left <= 0:
        return None
    known = facts.computed_on
    why = f"step {facts.fault_step + 1} was done again by two replicas, and their bits differ"
    if len(known) != 1 and Rung.DIAGNOSE in facts.ladder and not facts.findings:
        return PolicyVerdict(
            action=Action.DIAGNOSE,
            cause=Cause.SILENT_CORRUPTION,
            reason=f"{why} ({failure.detail}); results of all nodes are compared bit for bit, to "
            "find which of them it is",
            culprits=known,
            fingerprint=failure.fingerprint,
        )
    if not known or (len(known) > 1 and facts.free_nodes < len(known)):
        # Nobody to replace, or not enough nodes to replace all of them: the comparison is made
        # again, until the same failure has come often enough or the budget is spent.
        return None
    listed = names(known)
    whose = f"those of {listed} are wrong" if len(known) == 1 else f"one of {listed} is wrong"
    return PolicyVerdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION,
        # It spends a retry: a program whose bits are never the same must not use up all nodes.
        reason=f"replacing {listed}: {why}; {whose}: silent corruption",
        culprits=known,
    )


def _not_a_number_again(facts: PolicyInput) -> PolicyVerdict | None:
    """A step's loss is non-finite again: it is the data or the settings."""
    step = bad_step(facts.evidence, facts.fault_step)
    failure = first_failure(facts.evidence)
    if step is None or failure is None or step != facts.replayed_step or facts.retry_left <= 0:
        return None
    checks_first = Rung.RESTART not in facts.ladder and Rung.DIAGNOSE in facts.ladder
    if facts.non_finite_again is NonFiniteAgain.FAIL or (checks_first and not facts.findings):
        return None
    again = f"step {step} was done again, and its loss is non-finite again"
    what = f"rank {failure.rank}: {failure.detail}"
    if _skips_in_a_row(facts.skipped, step) >= _MAX_SKIPS_IN_A_ROW:
        return PolicyVerdict(
            action=Action.FAIL,
            cause=Cause.NON_FINITE,
            reason=f"{again}, as were those that were left out before it, so it is not the batch "
            f"({what}); lower optimizer.lr, or mend the data",
            fingerprint=failure.fingerprint,
            error=failure.traceback or failure.detail,
        )
    rolls_back = facts.non_finite_again is NonFiniteAgain.ROLLBACK
    left_out = StepRange(first=step, last=step)
    what_then = f"the batch of step {step} is left out"
    if rolls_back:
        left_out = _rolled_back(facts, step)
        what_then = _rollback_in_words(left_out)
    return PolicyVerdict(
        action=Action.ROLL_BACK if rolls_back else Action.SKIP_BATCH,
        cause=Cause.NON_FINITE,
        reason=f"{again} ({what}), so it is the data or the settings: {what_then}",
        fingerprint=failure.fingerprint,
        skipped=left_out,
    )


def _spiked(facts: PolicyInput) -> PolicyVerdict | None:
    """A loss far above those before it: back to the weights before that, past its batches.

    As PaLM's authors did (arXiv:2204.02311, section 5.1), who found that neither the batches nor
    the weights spike by themselves.
    """
    spike = _spike(facts)
    if spike is None:
        return None
    left_out = _left_out_for_spike(facts)
    if left_out is None:
        what_then = "no step is left to train, so training ends with it"
    else:
        what_then = _rollback_in_words(left_out)
    return PolicyVerdict(
        action=Action.RESTART_IN_PLACE if left_out is None else Action.ROLL_BACK,
        cause=Cause.SPIKE,
        reason=f"{spike.detail}; {what_then}",
        # No attempt has failed.
        spends_retry=False,
        skipped=left_out,
    )


def past_the_spike(verdict: PolicyVerdict, facts: PolicyInput) -> PolicyVerdict:
    """A node that was lost while ranks stopped for a spike is no reason to keep its weights.

    Nobody would find the spike again: to a new attempt, its loss is a usual one.
    """
    spike, left_out = _spike(facts), _left_out_for_spike(facts)
    if verdict.action is not Action.REPLACE_NODES or spike is None or left_out is None:
        return verdict
    reason = f"{verdict.reason}; {spike.detail}; {_rollback_in_words(left_out)}"
    return replace(verdict, reason=reason, skipped=left_out)


def _spike(facts: PolicyInput) -> Evidence | None:
    for item in facts.evidence:
        if item.detected is Cause.SPIKE:
            return item
    return None


def _left_out_for_spike(facts: PolicyInput) -> StepRange | None:
    """None when all steps are done.

    One step more than was trained: of its last one, a range has no state of the old history. A
    rank that is lost may have come a step further than the others.
    """
    gone = (EvidenceKind.NODE_LOST, EvidenceKind.NOT_STOPPED)
    is_lost = any(item.kind in gone for item in facts.evidence)
    last = facts.fault_step + 1 + is_lost
    if facts.total_steps is not None:
        last = min(last, facts.total_steps)
    return _rolled_back(facts, last) if last > facts.fault_step else None


def _rolled_back(facts: PolicyInput, last: int) -> StepRange:
    return StepRange(first=max(1, last - facts.rollback_steps + 1), last=last)


def _rollback_in_words(left_out: StepRange) -> str:
    return (
        f"going back to the weights after step {left_out.first - 1}; the batches of steps "
        f"{left_out} are left out"
    )


def _skips_in_a_row(skipped: tuple[StepRange, ...], step: int) -> int:
    """How many of the steps right before `step` had a non-finite loss, one after the other."""
    count = 0
    for each in reversed(skipped):
        if each.last != step - 1 - count:
            break
        count += 1
    return count


def _corrupt_again(facts: PolicyInput) -> PolicyVerdict | None:
    """A node on which a step's loss was non-finite and finite when done again, the second time."""
    step = bad_step(facts.evidence, facts.fault_step)
    known = tuple(node for node in facts.computed_on if node in facts.unreproduced)
    if step is None or step == facts.replayed_step or not known:
        return None
    listed = names(known)
    why = f"the loss of step {step} is non-finite, and {listed} had a part in it, as in one before "
    why += "that was finite when it was done again"
    if Rung.DIAGNOSE in facts.ladder and not facts.findings:
        return PolicyVerdict(
            action=Action.DIAGNOSE,
            cause=Cause.NON_FINITE,
            reason=f"{why}; results of all nodes are compared bit for bit first",
            culprits=known,
        )
    if len(known) > 1 or Rung.REPLACE not in facts.ladder or not facts.free_nodes:
        return None
    return PolicyVerdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION,
        reason=f"replacing {listed}: {why}; silent corruption, though its checks found nothing",
        culprits=known,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=False,
    )


# In this order, the first that says anything.
RULES = (_other_bits, _not_a_number_again, _corrupt_again, _spiked)
