"""Mistakes of the job's own program or settings: where a retry could only repeat them.

What does not belong here: starts that an agent refuses (`policy`), and jobs that ask for more
than nodes have (`misfit`).
"""

from __future__ import annotations

import re

from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.verdict import PolicyInput, PolicyVerdict, first_failure
from outlast.failures import FailureClass

# What decided a class is for those who look into an incident; see `diagnostics.core.exits`.
_SOURCE = re.compile(r" \([a-z' ]+, class '[a-z_]+', rule '[^']+' of table \d+\)")


def plain(detail: str) -> str:
    """What happened, without the rule of the table that gave it its class."""
    return _SOURCE.sub("", detail)


def when(facts: PolicyInput) -> str:
    """How far training was; of a script that says nothing of its steps, how long it ran."""
    if facts.fault_step >= 1:
        return f"after step {facts.fault_step}"
    return f"after {facts.ran_s:.0f} s" if facts.is_script else "before the first step"


def ended_early(sign: Evidence, completed_step: int, total_steps: int) -> Evidence:
    """The sign of a rank that ended with exit code 0 before all steps were done."""
    reached = f"after step {completed_step}" if completed_step > 0 else "before its first step"
    return replace(
        sign,
        detail=f"its process ended with exit code 0 {reached} of {total_steps}, without an error "
        "(does anything call sys.exit or os._exit?)",
        fault_class=FailureClass.ENDED_EARLY,
        fingerprint=str(FailureClass.ENDED_EARLY),
    )


def decide(facts: PolicyInput) -> PolicyVerdict | None:
    """An exception of the program that another try would only raise again.

    Of some exceptions that is known whenever they come (class `program_error`: a missing key, a
    wrong type or value, a failed assertion), but for what `_need_not_come_again` leaves out. Any
    other exception of the program counts only before the job has ever completed a step; later it
    may be a matter of the moment, and is tried once more, in `policy`. Of a script it is not known
    what it has done: what it raises early and whenever it comes ends the job, all else is tried
    once more.
    """
    failure = first_failure(facts.evidence)
    if failure is None or failure.kind is not EvidenceKind.WORKER_EXIT or not failure.fingerprint:
        return None
    if facts.retry_program_errors:
        return None
    if failure.fault_class is FailureClass.PROGRAM_ERROR:
        is_late = facts.is_script and facts.came_late
        is_certain = not is_late and not _need_not_come_again(facts, failure)
    elif facts.is_script:
        is_certain = False
    else:
        may_be = failure.fault_class in (FailureClass.USER_ERROR, FailureClass.ENDED_EARLY)
        has_trained = max(facts.fault_step, facts.last_fault_step) >= 1 or facts.committed_step
        is_certain = may_be and not has_trained
    if not is_certain:
        return None
    checked = "; checks of its nodes found nothing" if facts.findings else ""
    return PolicyVerdict(
        action=Action.FAIL,
        cause=Cause.USER_ERROR,
        reason=f"the job's own program failed {when(facts)}, on rank {failure.rank}: "
        f"{plain(failure.detail)}; it would fail again, so it is not retried{checked}",
        fingerprint=failure.fingerprint,
        error=failure.traceback or plain(failure.detail),
    )


def _need_not_come_again(facts: PolicyInput, failure: Evidence) -> bool:
    """Whether something speaks against the node rather than against the program.

    Memory that changes by itself can make any error: a wrong index, a key that is not there. The
    program may have been right as long as the same steps were done before without the error, or
    while there are other signs against the node and its checks have not run.
    """
    committed_step = -1 if facts.committed_step is None else facts.committed_step
    was_past_here = facts.fault_step < max(facts.last_fault_step, committed_step)
    is_looked_into = facts.replayed_step is not None or failure.node in facts.unreproduced
    is_suspect = not facts.findings and (
        failure.node in facts.suspects
        or any(item.kind is EvidenceKind.DETECTED for item in facts.evidence)
    )
    return was_past_here or is_looked_into or is_suspect
