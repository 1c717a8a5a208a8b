"""What to do about a fault: the ladder of recovery, cheapest rung first.

`decide` is pure and always says why, in words that a user reads in
`outlast incidents`. It knows nothing of how its verdict is carried out. The rules about steps
with a non-finite loss are in `reproducing`.
"""

from __future__ import annotations

from controller.core import (
    blame,
    causes,
    misfit,
    missing,
    planned,
    program_error,
    remedies,
    replacing,
    reproducing,
    swapping,
    unloadable,
)
from controller.core.evidence import (
    NO_FIRST_STEP_YET,
    NO_STEP_IN_TIME,
)
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind, Rung
from controller.core.naming import names
from controller.core.verdict import BLAMED_BEFORE, PolicyInput, PolicyVerdict, first_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId

_REPORTS_FAULT = "a device reports a fault of its own"
_OF_SETTING = "outlast.errors.SettingError: "


def decide(facts: PolicyInput) -> PolicyVerdict:
    """The verdict on an incident whose workers are stopped."""
    # No rung of the ladder: nothing has failed.
    if blameless := planned.left_in_order(facts) or planned.start_lost(facts):
        return blameless
    rules = (
        *(_refused, replacing.nodes_missing, misfit.decide, missing.decide, unloadable.decide),
        *(_not_stored, replacing.memory_damaged, replacing.unhealthy, replacing.drained),
        program_error.decide,
        *(*reproducing.RULES, _repeated, _limit_too_short, _exhausted),
    )
    found = (verdict for rule in rules if (verdict := rule(facts)) is not None)
    verdict = _within_ladder(next(found, None) or _restart_or_diagnose(facts), facts)
    return remedies.with_remedy(reproducing.past_the_spike(verdict, facts), facts)


def _refused(facts: PolicyInput) -> PolicyVerdict | None:
    """A start that the user's own settings make impossible, as an agent or a rank found."""
    failure = first_failure(facts.evidence)
    starts = (item for item in facts.evidence if item.kind is EvidenceKind.START_FAILED)
    for item in (*starts, *([failure] if failure is not None else [])):
        if item.fault_class is FailureClass.CONFIG:
            message = program_error.plain(item.detail).removeprefix(_OF_SETTING)
            return PolicyVerdict(
                action=Action.FAIL,
                cause=Cause.CONFIG,
                reason=f"the job cannot start as it is written: {message}",
                error=message,
                # Nothing is tried, and nothing has failed but the spec.
                spends_retry=False,
            )
    return None


def _not_stored(facts: PolicyInput) -> PolicyVerdict | None:
    """Storage does not answer a job that is to start, or does not take its last checkpoint.

    Nothing of the job has to change for storage to come back, and whatever ends the job frees
    host memory, where the outcome of all steps may be: so it is paused, whatever the ladder says.
    """
    for item in facts.evidence:
        if blame.lacks_storage(item):
            return PolicyVerdict(
                action=Action.PAUSE,
                cause=Cause.STORAGE,
                reason=item.detail or "storage does not answer",
                error=item.detail,
                spends_retry=False,
            )
    return None


def _repeated(facts: PolicyInput) -> PolicyVerdict | None:
    """The same failure again and again, with no step in between.

    An error of the user's code gets one confirming restart, any other exception two.
    """
    if facts.retry_program_errors:
        return None
    failure = blame.initiating(facts)
    if failure is None or failure.is_cascade or not failure.fingerprint:
        return None
    if failure.fault_class in causes.OF_HARDWARE:
        return None
    if failure.fingerprint != facts.last_fingerprint or facts.has_progress:
        return None
    times = facts.same_failures + 2
    if times < (2 if causes.is_deterministic(failure.fault_class) else 3):
        return None
    cause = causes.cause_of(failure.fault_class)
    return PolicyVerdict(
        # Nothing of the job has to change for storage to come back.
        action=_last_resort(facts) if cause is Cause.STORAGE else Action.FAIL,
        cause=cause,
        reason=f"rank {failure.rank} failed in the same way {times} times "
        f"{program_error.when(facts)}: {program_error.plain(failure.detail)}",
        fingerprint=failure.fingerprint,
        error=failure.traceback or failure.detail,
    )


def _limit_too_short(facts: PolicyInput) -> PolicyVerdict | None:
    """The same limit of the spec passed twice in a row, and nothing speaks against a node or the
    program.

    Each attempt may have done one step more: a first step has a limit of its own. A rank that
    holds the others up in a step is a reason to try further, whatever checks of its node say.
    """
    sign = _past_limit(facts)
    if sign is None or sign.fingerprint != facts.last_fingerprint:
        return None
    what, remedy, most_steps = _LIMITS[sign.fingerprint]
    has_progress = facts.fault_step > facts.last_fault_step + most_steps or facts.was_steady
    if sign.fingerprint == NO_STEP_IN_TIME and blame.has_suspects(facts):
        return None
    may_check = Rung.DIAGNOSE in facts.ladder and blame.has_suspects(facts) and not facts.findings
    if has_progress or may_check:
        return None
    checked = "; checks of the nodes found nothing" if facts.findings else ""
    return PolicyVerdict(
        action=_last_resort(facts),
        cause=Cause.HANG,
        reason=f"{what}: {sign.detail}{checked}, and no rank has failed; {remedy}, "
        "else see where its ranks stood (`outlast incidents show`)",
        fingerprint=sign.fingerprint,
        error=sign.detail,
    )


# What passed a limit twice, what to do where it is too short, how many steps may lie between.
_LIMITS = {
    NO_FIRST_STEP_YET: (
        "two starts in a row",
        "raise recovery.first_step_timeout_s if the job needs longer to start",
        0,
    ),
    NO_STEP_IN_TIME: (
        "two hangs in a row, a step apart at most",
        remedies.LONGER_STEPS,
        remedies.STEPS_APART,
    ),
}


def _past_limit(facts: PolicyInput) -> Evidence | None:
    """The sign of what took longer than a limit, where nothing else is known to be wrong."""
    if blame.initiating(facts) is not None:
        return None
    return next((item for item in facts.evidence if item.fingerprint in _LIMITS), None)


def _exhausted(facts: PolicyInput) -> PolicyVerdict | None:
    if facts.retry_left > 0 or facts.nothing_failed:
        return None
    failure = first_failure(facts.evidence)
    what = blame.describe(facts, failure)
    since = "the start" if facts.committed_step is None else f"checkpoint {facts.committed_step}"
    return PolicyVerdict(
        action=_last_resort(facts),
        cause=blame.cause(facts),
        reason=f"the retry budget is spent: {facts.faults_in_row + 1} faults since {since}, the "
        f"last one: {what}; raise recovery.retry_budget or commit checkpoints more often"
        if facts.faults_in_row
        else f"{what}; recovery.retry_budget is 0",
        error=blame.describe(facts, None)
        if failure is None
        else failure.traceback or failure.detail,
    )


def _restart_or_diagnose(facts: PolicyInput) -> PolicyVerdict:
    failure = blame.initiating(facts)
    culprits = blame.culprits(facts)
    what = blame.describe(facts, failure)
    first = failure or _past_limit(facts)
    checked = "; checks found nothing" if facts.findings else ""
    verdict = PolicyVerdict(
        action=Action.RESTART_IN_PLACE,
        cause=blame.cause(facts),
        reason=f"{what}{checked}; restarting processes in place",
        culprits=culprits,
        fingerprint="" if first is None else first.fingerprint,
        spends_retry=not facts.nothing_failed,
    )
    if because := _why_check(facts, failure, culprits):
        because = f"{what}; {because}"
        if swap := swapping.instead_of_checks(facts, verdict, because):
            return swap
        reason = f"{because}, so its nodes are checked first"
        return replace(verdict, action=Action.DIAGNOSE, reason=reason)
    if unseen := _bad_unseen(facts, culprits):
        return replace(
            verdict,
            action=Action.REPLACE_NODES,
            reason=f"{what}{checked}, but it is the third fault in a row there; "
            f"replacing {names(unseen)}",
            culprits=unseen,
            spends_retry=True,
        )
    return verdict


def _why_check(facts: PolicyInput, failure: Evidence | None, culprits: tuple[NodeId, ...]) -> str:
    """Why nodes should be checked before the job goes on; "" when they need not."""
    detected = blame.detected(facts.evidence)
    is_unattributable = failure is not None and (
        failure.fault_class in causes.UNATTRIBUTABLE or failure.is_cascade
    )
    # Slow steps are of no node in particular: all are checked.
    has_suspects = blame.has_suspects(facts) or is_unattributable or detected is not None
    if Rung.DIAGNOSE not in facts.ladder or not has_suspects or facts.findings:
        return ""
    # Uncorrectable memory, or a device that is gone: on the same node it would come again.
    if blame.cause(facts) is Cause.DEVICE:
        is_kernel = failure is not None and failure.fault_class is FailureClass.DEVICE_KERNEL
        return "a kernel failed on a device" if is_kernel else _REPORTS_FAULT
    if detected:
        against = "it" if culprits else "no node in particular"
        return f"a detector that acts speaks against {against}"
    if known_bad := [node for node in culprits if node in facts.suspects]:
        return f"the second fault on {names(known_bad)} lately"
    if blame.is_wide_hang_again(facts):
        return "the second hang of most nodes in a row"
    if Rung.RESTART not in facts.ladder:
        return "recovery.ladder has no rung restart"
    if facts.faults_in_row >= facts.in_place_restarts:
        return f"{facts.faults_in_row + 1} faults since the last checkpoint"
    return ""


def _bad_unseen(facts: PolicyInput, culprits: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Nodes that break one attempt after another, though their checks pass.

    Found in simulation: such a node used up the job's whole retry budget in place. Only faults
    that a program hardly makes by itself count; those of user code would follow it elsewhere.
    """
    failure = blame.initiating(facts)
    # A rank that lost its connection tells of another one's end.
    is_own = failure is not None and not failure.is_cascade
    is_machines = blame.cause(facts) in causes.OF_MACHINES
    if not (is_own and is_machines) or not facts.findings or Rung.REPLACE not in facts.ladder:
        return ()
    # What began before the last checkpoint was overcome.
    if facts.faults_in_row < BLAMED_BEFORE:
        return ()
    return tuple(node for node in culprits if node in facts.blamed_before)


def _within_ladder(verdict: PolicyVerdict, facts: PolicyInput) -> PolicyVerdict:
    """The verdict, or what comes after it where the job does not allow it."""
    ladder = facts.ladder
    restarts = Rung.RESTART in ladder or Rung.DIAGNOSE in ladder
    replaces = Rung.REPLACE in ladder
    action = _last_resort(facts)
    if verdict.action is Action.RESTART_IN_PLACE and not restarts:
        missing = Rung.RESTART
        if replaces and verdict.culprits:
            action = Action.REPLACE_NODES
        elif facts.nothing_failed:
            # It is no rung to let workers go on that were stopped for a look.
            return verdict
    elif (
        verdict.action is Action.REPLACE_NODES
        and not replaces
        and verdict.cause not in (Cause.NODE_DRAINED, Cause.MISFIT)
    ):
        missing = Rung.REPLACE
    else:
        return verdict
    return replace(
        verdict,
        action=action,
        reason=f"{verdict.reason}; recovery.ladder has no rung {missing}",
        error=verdict.error or verdict.reason,
    )


def _last_resort(facts: PolicyInput) -> Action:
    """What is done when nothing else is left."""
    return Action.PAUSE if Rung.PAUSE in facts.ladder else Action.FAIL
