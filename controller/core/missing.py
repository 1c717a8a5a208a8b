"""Files and modules that are not there: the job's mistake, or that of one node's mounts.

What a job needs is the same on all of its nodes, so what is missing on each of them was named
wrongly, and what only one node lacks is that node's trouble: another one takes its place, if there
is one, and it stays free for jobs that do not need it (as with `misfit`). Every agent looks for the
spec's data before its ranks start, and the job waits for all of these answers. Of what a rank
misses later the others may not have had the time to say so; a second node settles it then.

What does not belong here: jobs that ask for more than a node has (`misfit`).
"""

from __future__ import annotations

from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind, Rung
from controller.core.naming import names
from controller.core.program_error import plain
from controller.core.verdict import PolicyInput, PolicyVerdict, first_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId


def lacks(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The signs of what is missing, if that is what the fault began with."""
    found = tuple(
        item
        for item in evidence
        if item.fault_class is FailureClass.MISSING and item.node is not None
    )
    answers = tuple(item for item in found if item.kind is EvidenceKind.START_FAILED)
    if answers:
        # Whatever became of ranks that were started elsewhere and waited for the others.
        return answers
    failure = first_failure(evidence)
    return found if failure is None or failure.fault_class is FailureClass.MISSING else ()


def decide(facts: PolicyInput) -> PolicyVerdict | None:
    """What to do where files are missing; None where nothing is, or it may have come back."""
    found = lacks(facts.evidence)
    if not found or (facts.retry_program_errors and not _all_answered(found)):
        return None
    nodes = tuple(dict.fromkeys(item.node for item in found if item.node is not None))
    has_trained = facts.came_late or facts.last_fault_step >= 1 or bool(facts.committed_step)
    is_repeated = any(item.fingerprint == facts.last_fingerprint != "" for item in found)
    if facts.came_late and not is_repeated and not _all_answered(found):
        # It was there for a while: a mount that went away may be back, as after other errors.
        return None
    is_everywhere = len(nodes) >= facts.num_nodes or (
        not has_trained and len({*nodes, *facts.lacking_before}) > 1 and not _all_answered(found)
    )
    if is_everywhere:
        return _everywhere(facts, found, nodes, has_trained=has_trained)
    where = f"missing on {names(nodes)} and not on the job's other nodes"
    reason = f"{where}: {_listed(found)}"
    if facts.may_fit:
        return PolicyVerdict(
            action=Action.REPLACE_NODES,
            cause=Cause.MISFIT,
            reason=f"{reason}; looking for other nodes",
            spends_retry=False,
        )
    can_wait = has_trained and Rung.PAUSE in facts.ladder
    return PolicyVerdict(
        action=Action.PAUSE if can_wait else Action.FAIL,
        cause=Cause.MISFIT,
        reason=f"{reason}; no other node can take its place; {facts.nodes_in_words}; mount or "
        "install it there, or add a node that has it",
        error=_error(found),
        spends_retry=False,
    )


def _everywhere(
    facts: PolicyInput, found: tuple[Evidence, ...], nodes: tuple[NodeId, ...], *, has_trained: bool
) -> PolicyVerdict:
    by_spec = _all_answered(found)
    what = "the job cannot start as it is written" if by_spec else "the job's own program failed"
    each = f"every node of the job ({names(nodes)})" if len(nodes) > 1 else names(nodes)
    also = tuple(node for node in facts.lacking_before if node not in nodes)
    before = f" and before on {names(also)}" if also else ""
    reason = f"missing on {each}{before}: {_listed(found)}"
    if by_spec and has_trained:
        # The job has read it before, so nothing of the job has to change.
        return PolicyVerdict(
            action=Action.PAUSE if Rung.PAUSE in facts.ladder else Action.FAIL,
            cause=Cause.STORAGE,
            reason=f"{reason}; it was there when the job trained before: bring it back",
            error=_error(found),
            spends_retry=False,
        )
    return PolicyVerdict(
        action=Action.FAIL,
        cause=Cause.CONFIG if by_spec else Cause.USER_ERROR,
        reason=f"{what}: {reason}",
        fingerprint=found[0].fingerprint,
        error=_error(found),
        spends_retry=False,
    )


def _all_answered(found: tuple[Evidence, ...]) -> bool:
    """Whether the agents have looked, on all of the job's nodes, before a rank was started."""
    return all(item.kind is EvidenceKind.START_FAILED for item in found)


def _listed(found: tuple[Evidence, ...]) -> str:
    """What is missing, once for all nodes of which the same is said."""
    on: dict[str, list[NodeId]] = {}
    for item in found:
        if item.node is not None and item.node not in on.setdefault(plain(item.detail), []):
            on[plain(item.detail)].append(item.node)
    if len(on) == 1:
        return next(iter(on))
    lines = [f"{names(tuple(nodes))}: {detail}" for detail, nodes in list(on.items())[:3]]
    more = f"; and {len(on) - 3} more" if len(on) > 3 else ""
    return "; ".join(lines) + more


def _error(found: tuple[Evidence, ...]) -> str:
    first = min(found, key=lambda item: item.at_s)
    return first.traceback or plain(first.detail)
