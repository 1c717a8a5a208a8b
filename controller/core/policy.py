"""What to do about a fault: the ladder of recovery, cheapest rung first.

`decide` is pure and always says why, in words that a user reads in
`outlast incidents`. It knows nothing of how its verdict is carried out. The rules about steps
that gave no number are in `reproducing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from controller.core import (
    causes,
    misfit,
    missing,
    planned,
    program_error,
    remedies,
    reproducing,
    unloadable,
)
from controller.core.evidence import (
    NO_FIRST_STEP_YET,
    NO_STEP_IN_TIME,
    nodes_with_odd_stacks,
)
from controller.core.naming import names
from controller.core.records import Action, Cause, Evidence, EvidenceKind, Rung
from controller.core.verdict import BLAMED_BEFORE, Facts, Verdict, root_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId

_REPORTS_FAULT = "a device reports a fault of its own"
_OF_SETTING = "outlast.errors.SettingError: "
# Figures of healthy nodes differ by more than a tenth from run to run.
_CLEARLY_WORSE = 0.8


def decide(facts: Facts) -> Verdict:
    """The verdict on an incident whose workers are stopped."""
    # No rung of the ladder: nothing has failed.
    if blameless := planned.left_in_order(facts) or planned.start_lost(facts):
        return blameless
    rules = (
        *(_refused, _nodes_missing, misfit.decide, missing.decide, unloadable.decide, _not_stored),
        *(_memory_damaged, _unhealthy, _drained, program_error.decide),
        *(*reproducing.RULES, _repeated, _limit_too_short, _exhausted),
    )
    found = (verdict for rule in rules if (verdict := rule(facts)) is not None)
    verdict = _within_ladder(next(found, None) or _restart_or_diagnose(facts), facts)
    return remedies.with_remedy(reproducing.past_the_spike(verdict, facts), facts)


def _initiating(facts: Facts) -> Evidence | None:
    """What everything else followed from, when that is the job's own processes."""
    root = root_failure(facts.evidence)
    stuck = any(item.kind is EvidenceKind.STALLED for item in facts.evidence)
    if root is None or (root.is_cascade and stuck):
        # Ranks lose each other while those of a job that hangs are stopped.
        return next(_stuck_program(facts.evidence), None)
    return root


def _stuck_program(evidence: tuple[Evidence, ...]) -> Iterator[Evidence]:
    """Signs of a hang that the program itself makes: another node would do no better."""
    return (
        item
        for item in evidence
        if item.kind is EvidenceKind.STALLED and item.fault_class is FailureClass.USER_ERROR
    )


def _refused(facts: Facts) -> Verdict | None:
    """A start that the user's own settings make impossible, as an agent or a rank found."""
    root = root_failure(facts.evidence)
    starts = (item for item in facts.evidence if item.kind is EvidenceKind.START_FAILED)
    for item in (*starts, *([root] if root is not None else [])):
        if item.fault_class is FailureClass.CONFIG:
            told = program_error.plain(item.detail).removeprefix(_OF_SETTING)
            return Verdict(
                action=Action.FAIL,
                cause=Cause.CONFIG,
                reason=f"the job cannot start as it is written: {told}",
                error=told,
                # Nothing is tried, and nothing has failed but the spec.
                spends_retry=False,
            )
    return None


def _nodes_missing(facts: Facts) -> Verdict | None:
    """Nodes that are gone, do not obey or cannot run the job."""
    kinds = {
        EvidenceKind.NODE_LOST: Cause.NODE_LOST,
        EvidenceKind.NOT_STOPPED: Cause.NODE_UNRESPONSIVE,
        EvidenceKind.START_FAILED: Cause.NODE_UNHEALTHY,
    }
    # A node that refused because the job does not fit it, or storage is silent, is well.
    misfits = (*misfit.refusals(facts.evidence), *missing.lacks(facts.evidence))
    found = [
        item
        for item in facts.evidence
        if item.kind in kinds
        and item.node is not None
        and item not in misfits
        and not _lacks_storage(item)
    ]
    if not found:
        return None
    nodes = _unique(found)
    # Where there is one, the reason names it already.
    told = [item.detail if len(nodes) == 1 else f"{item.node}: {item.detail}" for item in found[:4]]
    details = "; ".join(told)
    first = min(found, key=lambda item: list(kinds).index(item.kind)).kind
    if first is EvidenceKind.START_FAILED and facts.retry_left <= 0:
        # As many nodes as the budget allows could not start it: by now it is more likely the job.
        return None
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=kinds[first],
        reason=f"replacing {names(nodes)}: {details}",
        culprits=nodes,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=first is EvidenceKind.START_FAILED,
    )


def _memory_damaged(facts: Facts) -> Verdict | None:
    """Nodes whose host memory changed by itself again; the first time stops nobody."""
    found = [
        item
        for item in facts.evidence
        if item.detected is Cause.SILENT_CORRUPTION and item.node is not None
    ]
    if not found:
        return None
    nodes = _unique(found)
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION,
        reason=f"replacing {', '.join(nodes)}: its host memory did not hold what was written to "
        f"it: {'; '.join(item.detail for item in found[:4])}",
        culprits=nodes,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=False,
    )


def _unhealthy(facts: Facts) -> Verdict | None:
    """Nodes that failed their checks, and for each bad link the end that has to go."""
    failed = [node for node, verdict in facts.findings if verdict == "fail"]
    reasons = ["checks after the fault failed there"] if failed else []
    links = [link for link in facts.bad_links if not set(link) & set(failed)]
    for link in links:
        if not set(link) & set(failed):
            end, why = _end_to_replace(facts, link, links)
            failed.append(end)
            reasons.append(f"the link {link[0]}--{link[1]} is bad, and {why}")
    if not failed:
        return None
    corrupt = [node for node in failed if node in facts.corrupt]
    if corrupt:
        reasons.append(f"silent corruption: {names(corrupt)} computed other bits than is right")
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION if corrupt else Cause.NODE_UNHEALTHY,
        reason=f"replacing {names(failed)}: {'; '.join(reasons)}",
        culprits=tuple(failed),
    )


def _end_to_replace(
    facts: Facts, link: tuple[NodeId, NodeId], links: list[tuple[NodeId, NodeId]]
) -> tuple[NodeId, str]:
    """Which end of a bad link goes, and why. One is enough: the link goes with it."""
    one, other = link
    counts = {end: sum(end in each for each in links) for end in link}
    if counts[one] != counts[other]:
        end = max(link, key=lambda node: counts[node])
        return end, f"{end} is an end of {counts[end]} bad links"
    figures = dict(facts.figures)
    own = [figures.get(end) for end in link]
    if own[0] is not None and own[1] is not None:
        worse, better = (one, other) if own[0] < own[1] else (other, one)
        if figures[worse] < _CLEARLY_WORSE * figures[better]:
            share = f"{figures[worse]:.0%} of what is expected against {figures[better]:.0%}"
            return worse, f"{worse} has the worse figures of its two ends ({share})"
    begun = [end for end in link if end in _culprits(facts)]
    if len(begun) == 1:
        return begun[0], f"neither end has worse figures; the fault began on {begun[0]}"
    return other, "neither end has worse figures; either would do"


def _drained(facts: Facts) -> Verdict | None:
    drained = [item for item in facts.evidence if item.kind is EvidenceKind.DRAIN]
    if not drained:
        return None
    nodes = _unique(drained)
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=Cause.NODE_DRAINED,
        reason=f"moving off {names(nodes)}: a person drains it",
        culprits=nodes,
        spends_retry=False,
    )


def _not_stored(facts: Facts) -> Verdict | None:
    """Storage does not answer a job that is to start, or does not take its last checkpoint.

    Nothing of the job has to change for storage to come back, and whatever ends the job frees
    host memory, where the outcome of all steps may be: so it is paused, whatever the ladder says.
    """
    for item in facts.evidence:
        if _lacks_storage(item):
            return Verdict(
                action=Action.PAUSE,
                cause=Cause.STORAGE,
                reason=item.detail or "storage does not answer",
                error=item.detail,
                spends_retry=False,
            )
    return None


def _lacks_storage(item: Evidence) -> bool:
    if item.kind is EvidenceKind.START_FAILED:
        return item.fault_class is FailureClass.STORAGE
    return item.fault_class is FailureClass.LAST_CHECKPOINT


def _repeated(facts: Facts) -> Verdict | None:
    """The same failure again and again, with no step in between.

    An error of the user's code gets one confirming restart, any other exception two.
    """
    root = _initiating(facts)
    if root is None or root.is_cascade or not root.fingerprint:
        return None
    no_progress = facts.fault_step <= facts.last_fault_step
    if root.fingerprint != facts.last_fingerprint or not no_progress:
        return None
    times = facts.same_failures + 2
    if times < (2 if causes.is_deterministic(root.fault_class) else 3):
        return None
    cause = causes.cause_of(root.fault_class)
    return Verdict(
        # Nothing of the job has to change for storage to come back.
        action=_last_resort(facts) if cause is Cause.STORAGE else Action.FAIL,
        cause=cause,
        reason=f"rank {root.rank} failed in the same way {times} times "
        f"{program_error.when(facts.fault_step)}: {program_error.plain(root.detail)}",
        fingerprint=root.fingerprint,
        error=root.traceback or root.detail,
    )


def _limit_too_short(facts: Facts) -> Verdict | None:
    """The same limit of the spec passed twice in a row, and nothing speaks against a node or the
    program.

    Each attempt may have done one step more: a first step has a limit of its own. A rank that
    holds the others up in a step is a reason to try further, whatever checks of its node say.
    """
    sign = _past_limit(facts)
    if sign is None or sign.fingerprint != facts.last_fingerprint:
        return None
    what, remedy, most_steps = _LIMITS[sign.fingerprint]
    has_progress = facts.fault_step > facts.last_fault_step + most_steps
    if sign.fingerprint == NO_STEP_IN_TIME and _has_suspects(facts):
        return None
    may_check = Rung.DIAGNOSE in facts.ladder and _has_suspects(facts) and not facts.findings
    if has_progress or may_check:
        return None
    checked = "; checks of the nodes found nothing" if facts.findings else ""
    return Verdict(
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


def _past_limit(facts: Facts) -> Evidence | None:
    """The sign of what took longer than a limit, where nothing else is known to be wrong."""
    if _initiating(facts) is not None:
        return None
    return next((item for item in facts.evidence if item.fingerprint in _LIMITS), None)


def _exhausted(facts: Facts) -> Verdict | None:
    if facts.retry_left > 0 or facts.nothing_failed:
        return None
    root = root_failure(facts.evidence)
    since = "the start" if facts.committed_step is None else f"checkpoint {facts.committed_step}"
    return Verdict(
        action=_last_resort(facts),
        cause=_cause(facts),
        reason=f"the retry budget is spent: {facts.faults_in_row + 1} faults since {since}, the "
        f"last one: {_describe(facts, root)}; raise recovery.retry_budget or commit checkpoints "
        "more often",
        error=_describe(facts, None) if root is None else root.traceback or root.detail,
    )


def _restart_or_diagnose(facts: Facts) -> Verdict:
    root = _initiating(facts)
    culprits = _culprits(facts)
    what = _describe(facts, root)
    first = root or _past_limit(facts)
    fingerprint = "" if first is None else first.fingerprint
    known_bad = [node for node in culprits if node in facts.suspects]
    always = Rung.RESTART not in facts.ladder
    often = facts.faults_in_row >= facts.in_place_restarts
    detected = _detected(facts.evidence)
    # Uncorrectable memory, or a device that is gone: on the same node it would come again.
    device = _cause(facts) is Cause.DEVICE
    is_anyones = root is not None and (root.fault_class in causes.ANYONES or root.is_cascade)
    # Slow steps are of no node in particular: all are checked.
    has_suspects = _has_suspects(facts) or is_anyones or detected is not None
    may_check = Rung.DIAGNOSE in facts.ladder and has_suspects and not facts.findings
    if may_check and (always or often or known_bad or detected or device):
        if device:
            is_kernel = root is not None and root.fault_class is FailureClass.DEVICE_KERNEL
            because = "a kernel failed on a device" if is_kernel else _REPORTS_FAULT
        elif detected:
            against = "it" if culprits else "no node in particular"
            because = f"a detector that acts speaks against {against}"
        elif known_bad:
            because = f"the second fault on {names(known_bad)} lately"
        elif always:
            because = "recovery.ladder has no rung restart"
        else:
            because = f"{facts.faults_in_row + 1} faults since the last checkpoint"
        return Verdict(
            action=Action.DIAGNOSE,
            cause=_cause(facts),
            reason=f"{what}; {because}, so its nodes are checked first",
            culprits=culprits,
            fingerprint=fingerprint,
            spends_retry=not facts.nothing_failed,
        )
    checked = "; checks found nothing" if facts.findings else ""
    if unseen := _bad_unseen(facts, culprits):
        return Verdict(
            action=Action.REPLACE_NODES,
            cause=_cause(facts),
            reason=f"{what}{checked}, but it is the third fault in a row there; "
            f"replacing {names(unseen)}",
            culprits=unseen,
            fingerprint=fingerprint,
        )
    return Verdict(
        action=Action.RESTART_IN_PLACE,
        cause=_cause(facts),
        reason=f"{what}{checked}; restarting processes in place",
        culprits=culprits,
        fingerprint=fingerprint,
        spends_retry=not facts.nothing_failed,
    )


def _bad_unseen(facts: Facts, culprits: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Nodes that break one attempt after another, though their checks pass.

    Found in simulation: such a node used up the job's whole retry budget in place. Only faults
    that a program hardly makes by itself count; those of user code would follow it elsewhere.
    """
    root = _initiating(facts)
    # A rank that lost its connection tells of another one's end.
    is_own = root is not None and not root.is_cascade
    is_machines = _cause(facts) in causes.OF_MACHINES
    if not (is_own and is_machines) or not facts.findings or Rung.REPLACE not in facts.ladder:
        return ()
    # What began before the last checkpoint was overcome.
    if facts.faults_in_row < BLAMED_BEFORE:
        return ()
    return tuple(node for node in culprits if node in facts.blamed_before)


def _within_ladder(verdict: Verdict, facts: Facts) -> Verdict:
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


def _last_resort(facts: Facts) -> Action:
    """What is done when nothing else is left."""
    return Action.PAUSE if Rung.PAUSE in facts.ladder else Action.FAIL


def _culprits(facts: Facts) -> tuple[NodeId, ...]:
    if next(_stuck_program(facts.evidence), None):
        return ()
    stalled = [item for item in facts.evidence if item.kind is EvidenceKind.STALLED]
    root = root_failure(facts.evidence)
    if root is not None and root.fault_class in causes.NOBODYS:
        return ()
    # Every node has stacks, and who lost a peer did nothing: neither is a sign against a node.
    others = [
        item
        for item in facts.evidence
        if item.kind is not EvidenceKind.STACKS and not item.is_cascade
    ]
    is_own = root is not None and not root.is_cascade
    named = _unique(stalled or ([root] if root is not None and is_own else others))
    return named or nodes_with_odd_stacks(facts.evidence)


def _has_suspects(facts: Facts) -> bool:
    """Whether some node may be at fault: those that are blamed, or any of those that hang."""
    stalled = (item for item in facts.evidence if item.kind is EvidenceKind.STALLED)
    is_program = next(_stuck_program(facts.evidence), None) is not None
    return bool(_culprits(facts)) or (not is_program and any(i.num_nodes > 1 for i in stalled))


def _cause(facts: Facts) -> Cause:
    root = _initiating(facts)
    if root is not None and root.kind is EvidenceKind.WORKERS_MISSING:
        return Cause.WORKERS_MISSING
    if root is not None:
        return causes.cause_of(root.fault_class)
    detected = _detected(facts.evidence)
    if detected is not None:
        return detected.detected or Cause.UNKNOWN
    slow = (EvidenceKind.STALLED, EvidenceKind.NO_FIRST_STEP)
    if any(item.kind in slow for item in facts.evidence):
        return Cause.HANG
    if any(item.kind is EvidenceKind.START_FAILED for item in facts.evidence):
        return Cause.NODE_UNHEALTHY
    return Cause.UNKNOWN


def _detected(evidence: tuple[Evidence, ...]) -> Evidence | None:
    return next((item for item in evidence if item.kind is EvidenceKind.DETECTED), None)


def _describe(facts: Facts, root: Evidence | None) -> str:
    if root is not None and root.kind is EvidenceKind.WORKERS_MISSING:
        return root.detail
    if root is not None and root.is_cascade:
        first = f"rank {root.rank} on {root.node}: {program_error.plain(root.detail)}"
        return f"ranks lost each other ({first}), and what failed first is not known"
    if root is not None:
        return f"rank {root.rank} on {root.node} failed: {program_error.plain(root.detail)}"
    # Stacks come after the sign that had them taken; they are read elsewhere.
    signs = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    return "; ".join(item.detail for item in signs[:2])


def _unique(evidence: list[Evidence]) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys(item.node for item in evidence if item.node is not None))
