"""What to do about a fault: the ladder of recovery, cheapest rung first.

`decide` is pure and always says why, in words that a user reads in
`outlast incidents`. It knows nothing of how its verdict is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from controller.core.evidence import nodes_with_odd_stacks
from controller.core.records import Action, Cause, Evidence, EvidenceKind, NonFiniteAgain, Rung
from outlast.ids import NodeId
from outlast.skipped import StepRange

_CAUSE_OF_CLASS = {
    "user_error": Cause.USER_ERROR,
    "cuda_oom": Cause.OUT_OF_MEMORY,
    "oom_host": Cause.OUT_OF_MEMORY,
    "storage": Cause.STORAGE,
    "killed_by_signal": Cause.WORKER_KILLED,
    "nccl": Cause.TRANSIENT,
    "non_finite": Cause.NON_FINITE,
    "non_finite_own_gradient": Cause.NON_FINITE,
    "non_finite_gradient": Cause.NON_FINITE,
    "corrupt": Cause.SILENT_CORRUPTION,
    "corrupt_somewhere": Cause.SILENT_CORRUPTION,
}
_CAUSE_BY_NAME = {str(cause): cause for cause in Cause}
# Deterministic in the user's own code or settings: repeating them changes nothing.
_DETERMINISTIC = ("user_error", "cuda_oom")
_NON_FINITE = ("non_finite", "non_finite_own_gradient", "non_finite_gradient")
_CORRUPT = ("corrupt", "corrupt_somewhere")
# All ranks end of these alike: who ended first did nothing that the others did not.
_ANYONES = ("non_finite_gradient", "corrupt_somewhere")
# Data are shuffled, so bad batches are not neighbours: one more, and it is the weights.
_MAX_SKIPS_IN_A_ROW = 2
# Figures of healthy nodes differ by more than a tenth from run to run.
_CLEARLY_WORSE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a verdict may depend on."""

    evidence: tuple[Evidence, ...]
    # Verdict of the checks after the fault by node; empty before any ran.
    findings: tuple[tuple[NodeId, str], ...]
    # What they found between nodes, and each node's worst figure (1 is as good as expected).
    bad_links: tuple[tuple[NodeId, NodeId], ...]
    figures: tuple[tuple[NodeId, float], ...]
    # Nodes whose results differ in bits from what is right.
    corrupt: tuple[NodeId, ...] = ()
    # Nodes on which an earlier fault began lately.
    suspects: tuple[NodeId, ...]
    fault_step: int
    last_fingerprint: str
    last_fault_step: int
    # How often in a row the last failure had come back before this time.
    same_failures: int
    faults_in_row: int
    ladder: tuple[Rung, ...]
    in_place_restarts: int
    retry_left: int
    committed_step: int | None
    # Nodes that had a part in what the rank that failed first computed.
    computed_on: tuple[NodeId, ...] = ()
    # The step that gave no number before and is done again, and what was left out so far.
    replayed_step: int | None = None
    skipped: tuple[StepRange, ...] = ()
    # Nodes that had a part in such a step which was a number when it was done again.
    unreproduced: tuple[NodeId, ...] = ()
    non_finite_again: NonFiniteAgain = NonFiniteAgain.SKIP
    rollback_steps: int = 100
    # Free nodes that could take a place.
    free_nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do, about which nodes, and why."""

    action: Action
    cause: Cause
    reason: str
    culprits: tuple[NodeId, ...] = ()
    fingerprint: str = ""
    error: str = ""
    spends_retry: bool = True
    # Steps that are left out from now on.
    skipped: StepRange | None = None


def decide(facts: Facts) -> Verdict:
    """The verdict on an incident whose workers are stopped."""
    rules = (
        *(_refused, _nodes_missing, _unhealthy, _drained),
        *(_other_bits, _not_a_number_again, _corrupt_again, _repeated, _exhausted),
    )
    found = (verdict for rule in rules if (verdict := rule(facts)) is not None)
    return _within_ladder(next(found, None) or _restart_or_diagnose(facts), facts)


def root_failure(evidence: tuple[Evidence, ...]) -> Evidence | None:
    """The worker failure that the others followed from.

    The earliest one that is not a cascade wins; a lost connection is what a
    rank says when *another* one died, so it counts only if nothing else is known.
    """
    exits = [item for item in evidence if item.kind is EvidenceKind.WORKER_EXIT]
    exits.sort(key=lambda item: item.at_s)
    initiating = [item for item in exits if not item.is_cascade]
    return next(iter(initiating or exits), None)


def bad_step(evidence: tuple[Evidence, ...], fault_step: int) -> int | None:
    """The step that gave no number, when that is what the fault is about."""
    root = root_failure(evidence)
    # The weights were not touched: every rank had completed the step before.
    is_bad = root is not None and root.fault_class in _NON_FINITE and fault_step >= 0
    return fault_step + 1 if is_bad else None


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
        if item.kind is EvidenceKind.STALLED and item.fault_class == "user_error"
    )


def _refused(facts: Facts) -> Verdict | None:
    """A start that the user's own settings make impossible."""
    for item in facts.evidence:
        if item.kind is EvidenceKind.START_FAILED and item.fault_class == "config":
            return Verdict(
                action=Action.FAIL,
                cause=Cause.CONFIG,
                reason=f"the job cannot start as it is written: {item.detail}",
                error=item.detail,
            )
    return None


def _nodes_missing(facts: Facts) -> Verdict | None:
    """Nodes that are gone, do not obey or cannot run the job."""
    kinds = {
        EvidenceKind.NODE_LOST: Cause.NODE_LOST,
        EvidenceKind.NOT_STOPPED: Cause.NODE_UNRESPONSIVE,
        EvidenceKind.START_FAILED: Cause.NODE_UNHEALTHY,
    }
    found = [item for item in facts.evidence if item.kind in kinds and item.node is not None]
    if not found:
        return None
    nodes = _unique(found)
    details = "; ".join(f"{item.node}: {item.detail}" for item in found[:4])
    first = min(found, key=lambda item: list(kinds).index(item.kind)).kind
    if first is EvidenceKind.START_FAILED and facts.retry_left <= 0:
        # As many nodes as the budget allows could not start it: by now it is more likely the job.
        return None
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=kinds[first],
        reason=f"replacing {', '.join(nodes)}: {details}",
        culprits=nodes,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=first is EvidenceKind.START_FAILED,
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
        reasons.append(f"silent corruption: {', '.join(corrupt)} computed other bits than is right")
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION if corrupt else Cause.NODE_UNHEALTHY,
        reason=f"replacing {', '.join(failed)}: {'; '.join(reasons)}",
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
        reason=f"moving off {', '.join(nodes)}: a person drains it",
        culprits=nodes,
        spends_retry=False,
    )


def _other_bits(facts: Facts) -> Verdict | None:
    """Two replicas computed the same part of a step, and their bits differ."""
    root = root_failure(facts.evidence)
    if root is None or root.fault_class not in _CORRUPT:
        return None
    known = facts.computed_on
    why = f"step {facts.fault_step + 1} was done again by two replicas, and their bits differ"
    if len(known) != 1 and Rung.DIAGNOSE in facts.ladder and not facts.findings:
        return Verdict(
            action=Action.DIAGNOSE,
            cause=Cause.SILENT_CORRUPTION,
            reason=f"{why} ({root.detail}); results of all nodes are compared bit for bit, to "
            "find which of them it is",
            culprits=known,
            fingerprint=root.fingerprint,
        )
    if not known or (len(known) > 1 and facts.free_nodes < len(known)):
        # Nobody to replace, or not enough nodes to replace all of them: the comparison is made
        # again, until the same failure has come often enough or the budget is spent.
        return None
    names = ", ".join(known)
    whose = f"those of {names} are wrong" if len(known) == 1 else f"one of {names} is wrong"
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION,
        reason=f"replacing {names}: {why}; {whose}: silent corruption",
        culprits=known,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=False,
    )


def _not_a_number_again(facts: Facts) -> Verdict | None:
    """A step that gave no number gives none again: it is the data or the settings."""
    step = bad_step(facts.evidence, facts.fault_step)
    root = root_failure(facts.evidence)
    if step is None or root is None or step != facts.replayed_step or facts.retry_left <= 0:
        return None
    checks_first = Rung.RESTART not in facts.ladder and Rung.DIAGNOSE in facts.ladder
    if facts.non_finite_again is NonFiniteAgain.FAIL or (checks_first and not facts.findings):
        return None
    again = f"step {step} was done again, and again it is no number"
    what = f"rank {root.rank}: {root.detail}"
    if _skips_in_a_row(facts.skipped, step) >= _MAX_SKIPS_IN_A_ROW:
        return Verdict(
            action=Action.FAIL,
            cause=Cause.NON_FINITE,
            reason=f"{again}, as were those that were left out before it, so it is not the batch "
            f"({what}); lower optimizer.lr, or mend the data",
            fingerprint=root.fingerprint,
            error=root.traceback or root.detail,
        )
    rolls_back = facts.non_finite_again is NonFiniteAgain.ROLLBACK
    first = max(1, step - facts.rollback_steps + 1) if rolls_back else step
    left_out = StepRange(first=first, last=step)
    what_then = f"the batch of step {step} is left out"
    if rolls_back:
        what_then = (
            f"going back to the weights after step {first - 1}; the batches of steps {left_out} "
            "are left out"
        )
    return Verdict(
        action=Action.ROLL_BACK if rolls_back else Action.SKIP_BATCH,
        cause=Cause.NON_FINITE,
        reason=f"{again} ({what}), so it is the data or the settings: {what_then}",
        fingerprint=root.fingerprint,
        skipped=left_out,
    )


def _skips_in_a_row(skipped: tuple[StepRange, ...], step: int) -> int:
    """How many of the steps right before `step` gave no number, one after the other."""
    count = 0
    for each in reversed(skipped):
        if each.last != step - 1 - count:
            break
        count += 1
    return count


def _corrupt_again(facts: Facts) -> Verdict | None:
    """A node on which a step gave no number that it gave when done again, the second time."""
    step = bad_step(facts.evidence, facts.fault_step)
    known = tuple(node for node in facts.computed_on if node in facts.unreproduced)
    if step is None or step == facts.replayed_step or not known:
        return None
    names = ", ".join(known)
    why = f"step {step} is no number, and {names} had a part in it, as in one before that was a "
    why += "number when it was done again"
    if Rung.DIAGNOSE in facts.ladder and not facts.findings:
        return Verdict(
            action=Action.DIAGNOSE,
            cause=Cause.NON_FINITE,
            reason=f"{why}; results of all nodes are compared bit for bit first",
            culprits=known,
        )
    if len(known) > 1 or Rung.REPLACE not in facts.ladder or not facts.free_nodes:
        return None
    return Verdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION,
        reason=f"replacing {names}: {why}; silent corruption, though its checks found nothing",
        culprits=known,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=False,
    )


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
    if times < (2 if root.fault_class in _DETERMINISTIC else 3):
        return None
    return Verdict(
        action=Action.FAIL,
        cause=_CAUSE_OF_CLASS.get(root.fault_class, Cause.TRANSIENT),
        reason=f"rank {root.rank} failed in the same way {times} times after step "
        f"{facts.fault_step}: {root.detail}",
        fingerprint=root.fingerprint,
        error=root.traceback or root.detail,
    )


def _exhausted(facts: Facts) -> Verdict | None:
    if facts.retry_left > 0:
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
    fingerprint = "" if root is None else root.fingerprint
    known_bad = [node for node in culprits if node in facts.suspects]
    always = Rung.RESTART not in facts.ladder
    often = facts.faults_in_row >= facts.in_place_restarts
    detected = _detected(facts.evidence)
    is_anyones = root is not None and root.fault_class in _ANYONES
    has_suspects = bool(culprits) or is_anyones
    may_check = Rung.DIAGNOSE in facts.ladder and has_suspects and not facts.findings
    if may_check and (always or often or known_bad or detected):
        if detected:
            because = "a detector that acts speaks against it"
        elif known_bad:
            because = f"the second fault on {', '.join(known_bad)} lately"
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
        )
    checked = "; checks found nothing" if facts.findings else ""
    return Verdict(
        action=Action.RESTART_IN_PLACE,
        cause=_cause(facts),
        reason=f"{what}{checked}; restarting processes in place",
        culprits=culprits,
        fingerprint=fingerprint,
    )


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
    elif (
        verdict.action is Action.REPLACE_NODES
        and not replaces
        and verdict.cause is not Cause.NODE_DRAINED
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
    # Every node has stacks: by themselves they are no sign against it.
    others = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    if root is not None and root.fault_class in _ANYONES:
        return ()
    named = _unique(stalled or ([root] if root is not None else others))
    return named or nodes_with_odd_stacks(facts.evidence)


def _cause(facts: Facts) -> Cause:
    root = _initiating(facts)
    if root is not None:
        return _CAUSE_OF_CLASS.get(root.fault_class, Cause.TRANSIENT)
    detected = _detected(facts.evidence)
    if detected is not None:
        return _CAUSE_BY_NAME.get(detected.fault_class, Cause.UNKNOWN)
    slow = (EvidenceKind.STALLED, EvidenceKind.NO_FIRST_STEP)
    if any(item.kind in slow for item in facts.evidence):
        return Cause.HANG
    if any(item.kind is EvidenceKind.START_FAILED for item in facts.evidence):
        return Cause.NODE_UNHEALTHY
    return Cause.UNKNOWN


def _detected(evidence: tuple[Evidence, ...]) -> Evidence | None:
    return next((item for item in evidence if item.kind is EvidenceKind.DETECTED), None)


def _describe(facts: Facts, root: Evidence | None) -> str:
    if root is not None:
        return f"rank {root.rank} on {root.node} failed: {root.detail}"
    # Stacks come after the sign that had them taken; they are read elsewhere.
    signs = [item for item in facts.evidence if item.kind is not EvidenceKind.STACKS]
    return "; ".join(item.detail for item in signs[:2])


def _unique(evidence: list[Evidence]) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys(item.node for item in evidence if item.node is not None))
