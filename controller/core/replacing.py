"""Rules that replace nodes: gone, damaged, found bad by checks, or drained by a person."""

from __future__ import annotations

from controller.core import misfit, missing
from controller.core.blame import culprits, lacks_storage, unique
from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.naming import names
from controller.core.verdict import PolicyInput, PolicyVerdict
from outlast.ids import NodeId

# Figures of healthy nodes differ by more than a tenth from run to run.
_CLEARLY_WORSE = 0.8


def nodes_missing(facts: PolicyInput) -> PolicyVerdict | None:
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
        and not lacks_storage(item)
    ]
    if not found:
        return None
    nodes = unique(found)
    # Where there is one, the reason names it already.
    is_one = len(nodes) == 1
    lines = [item.detail if is_one else f"{item.node}: {item.detail}" for item in found[:4]]
    details = "; ".join(lines)
    first = min(found, key=lambda item: list(kinds).index(item.kind)).kind
    if first is EvidenceKind.START_FAILED and facts.retry_left <= 0:
        # As many nodes as the budget allows could not start it: by now it is more likely the job.
        return None
    return PolicyVerdict(
        action=Action.REPLACE_NODES,
        cause=kinds[first],
        reason=f"replacing {names(nodes)}: {details}",
        culprits=nodes,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=first is EvidenceKind.START_FAILED,
    )


def memory_damaged(facts: PolicyInput) -> PolicyVerdict | None:
    """Nodes whose host memory changed by itself again; the first time stops nobody."""
    found = [
        item
        for item in facts.evidence
        if item.detected is Cause.SILENT_CORRUPTION and item.node is not None
    ]
    if not found:
        return None
    nodes = unique(found)
    return PolicyVerdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION,
        reason=f"replacing {', '.join(nodes)}: its host memory did not hold what was written to "
        f"it: {'; '.join(item.detail for item in found[:4])}",
        culprits=nodes,
        # Losing hardware is no sign of a job that cannot succeed.
        spends_retry=False,
    )


def unhealthy(facts: PolicyInput) -> PolicyVerdict | None:
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
    return PolicyVerdict(
        action=Action.REPLACE_NODES,
        cause=Cause.SILENT_CORRUPTION if corrupt else Cause.NODE_UNHEALTHY,
        reason=f"replacing {names(failed)}: {'; '.join(reasons)}",
        culprits=tuple(failed),
    )


def drained(facts: PolicyInput) -> PolicyVerdict | None:
    """Nodes that a person drains."""
    found = [item for item in facts.evidence if item.kind is EvidenceKind.DRAIN]
    if not found:
        return None
    nodes = unique(found)
    return PolicyVerdict(
        action=Action.REPLACE_NODES,
        cause=Cause.NODE_DRAINED,
        reason=f"moving off {names(nodes)}: a person drains it",
        culprits=nodes,
        spends_retry=False,
    )


def _end_to_replace(
    facts: PolicyInput, link: tuple[NodeId, NodeId], links: list[tuple[NodeId, NodeId]]
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
    begun = [end for end in link if end in culprits(facts)]
    if len(begun) == 1:
        return begun[0], f"neither end has worse figures; the fault began on {begun[0]}"
    return other, "neither end has worse figures; either would do"
