"""Jobs that do not fit their nodes: the job's problem, and no fault of any node.

What an agent says that its node has keeps a job off nodes that certainly lack something. What
turns out only when the job starts there comes as evidence of class `misfit` (the node does not
have it) or `occupied` (something else uses it now). Either way the node stays free for other
jobs: it is neither suspected nor quarantined, and no retry is spent. The job looks for other
nodes, and fails when there certainly are none.

What does not belong here: how much a job needs (`controller.convert` computes it of the spec).
"""

from __future__ import annotations

import math

from controller.core.capacity import (
    capacities_in_words,
    is_no_larger,
    lacking,
)
from controller.core.causes import MISFITS
from controller.core.context import Context
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.missing import lacks
from controller.core.program_error import plain
from controller.core.records import JobRecord, Misfit, NodeRecord
from controller.core.states import AWAY, PLACED, NodeState
from controller.core.verdict import PolicyInput, PolicyVerdict, first_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId

# What is in use may come free; a job that shares a machine with itself would try for ever.
# With the first wait of `Settings.occupied_retry_s`, doubled each time: a quarter of an hour.
MAX_TIMES_OCCUPIED = 6


def fits(job: JobRecord, node: NodeRecord, now_s: float) -> bool:
    """Whether, as far as is known, a node has what the job needs of it."""
    return not why_not(job, node, now_s)


def why_not(job: JobRecord, node: NodeRecord, now_s: float) -> str:
    """What a node lacks for this job, in words; "" for nothing that is known."""
    if node.workers < job.plan.workers_per_node:
        return f"has {node.workers} worker places and needs {job.plan.workers_per_node}"
    lacks = lacking(job.plan.need, node.capacity)
    if lacks:
        return lacks
    for known in job.misfits:
        if known.node != node.node:
            # Nor does it fit where there is no more; a node that has changed is asked anew.
            if is_no_larger(node.capacity, known.capacity):
                return f"has no more than {known.node}: {known.detail}"
        elif known.incarnation == node.incarnation and (
            known.until_s is None or now_s < known.until_s
        ):
            return known.detail
    return ""


def refusals(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The signs, if there are any, that the job does not fit the nodes they come from."""
    found = tuple(
        item
        for item in evidence
        if item.kind is EvidenceKind.START_FAILED and item.fault_class in MISFITS
    )
    failure = first_failure(evidence)
    if not found and failure is not None and failure.fault_class in MISFITS:
        return (failure,)
    return found


def speaks_of_nodes(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """The signs after which a job is kept off the nodes that they come from."""
    return refusals(evidence) or lacks(evidence)


def decide(facts: PolicyInput) -> PolicyVerdict | None:
    """What to do about a job that does not fit; None when it fits as far as is known."""
    found = refusals(facts.evidence)
    if not found:
        return None
    named = {item.node: item.detail for item in found}
    reason = "; ".join(f"{node}: {detail}" for node, detail in list(named.items())[:3])
    if len(named) > 3:
        reason += f"; and {len(named) - 3} other nodes"
    if facts.may_fit:
        return PolicyVerdict(
            action=Action.REPLACE_NODES,
            cause=Cause.MISFIT,
            reason=f"the job does not fit there, and no node is at fault: {reason}; "
            "looking for other nodes",
            spends_retry=False,
        )
    return PolicyVerdict(
        action=Action.FAIL,
        cause=Cause.MISFIT,
        reason=f"the job does not fit these nodes: {reason}; {facts.nodes_in_words}; {ADVICE}",
        error=reason,
        spends_retry=False,
    )


ADVICE = (
    "ask for less in the spec (resources.workers_per_node, resources.device, model, parallel), or "
    "add nodes that have it"
)


def may_fit(ctx: Context, job: JobRecord, evidence: tuple[Evidence, ...]) -> bool:
    """Whether enough nodes may still fit once those that these signs speak of are left out."""
    if ctx.settings.brings_nodes or not speaks_of_nodes(evidence):
        return True
    noted = _noted(ctx, job, evidence)
    needed = min((size.nodes for size in job.plan.sizes), default=job.plan.nodes)
    fitting = sum(
        node.state not in AWAY and _may_come_to_fit(noted, node)
        for node in ctx.state.nodes.values()
    )
    return fitting >= needed


def leave(ctx: Context, job: JobRecord, evidence: tuple[Evidence, ...]) -> JobRecord:
    """Keep the job off the nodes that it does not fit, which are free for others."""
    noted = _noted(ctx, job, evidence)
    unfit = set()
    for node_id in job.nodes:
        node = None if node_id is None else ctx.state.nodes.get(node_id)
        if node is None or fits(noted, node, ctx.now_s):
            continue
        unfit.add(node.node)
        is_placed = node.state in PLACED and node.state is not NodeState.DRAINING
        if is_placed and node.job == job.job_id:
            ctx.move_node(
                replace(node, job=None), NodeState.READY, f"{job.job_id} does not fit here"
            )
    return ctx.put(
        replace(
            ctx.state.jobs[job.job_id],
            misfits=noted.misfits,
            nodes=tuple(None if node in unfit else node for node in job.nodes),
            unchecked=tuple(node for node in job.unchecked if node not in unfit),
        )
    )


def asked_again_s(job: JobRecord, now_s: float) -> float | None:
    """When a node is asked again that lacks what something else uses now."""
    times = [known.until_s for known in job.misfits if known.until_s is not None]
    return min((at_s for at_s in times if at_s > now_s), default=None)


def in_words(ctx: Context, job: JobRecord) -> str:
    """What connected nodes have, if some do not fit; else ""."""
    nodes = _connected(ctx)
    unfit = [node for node in nodes if not fits(job, node, ctx.now_s)]
    if not unfit:
        return ""
    has = nodes_in_words(ctx)
    counted = "none" if len(unfit) == len(nodes) else f"{len(nodes) - len(unfit)} of them"
    # What a node said when the job was to start there is news; the rest follows from the above.
    notes = [
        f"{known.node}: {known.detail}"
        for known in job.misfits
        if any(node.node == known.node for node in unfit)
    ]
    refused = f" ({'; '.join(notes[:2])})" if notes else ""
    return f"connected nodes: {has}; {counted} fit{refused}"


def nodes_in_words(ctx: Context) -> str:
    """What connected nodes have, summarised."""
    nodes = _connected(ctx)
    if not nodes:
        return "no nodes"
    return capacities_in_words((node.workers, node.capacity) for node in nodes)


def _connected(ctx: Context) -> list[NodeRecord]:
    nodes = ctx.state.nodes.values()
    return [node for node in nodes if node.state not in AWAY and ctx.connected(node.node)]


def _noted(ctx: Context, job: JobRecord, evidence: tuple[Evidence, ...]) -> JobRecord:
    """The job, with a note for each node that refused it."""
    notes: dict[NodeId, Misfit] = {}
    before = {known.node: known.times for known in job.misfits}
    for item in speaks_of_nodes(evidence):
        node = None if item.node is None else ctx.state.nodes.get(item.node)
        if node is None or node.node in notes:
            continue
        note = Misfit(node=node.node, incarnation=node.incarnation, detail=item.detail)
        if item.fault_class is FailureClass.MISFIT:
            note = replace(note, capacity=node.capacity)
        elif item.fault_class is FailureClass.MISSING:
            note = replace(note, detail=plain(item.detail), is_missing_file=True)
        else:
            times = before.get(node.node, 0)
            wait_s = ctx.settings.occupied_retry_s * 2**times
            may_be_asked = times + 1 < MAX_TIMES_OCCUPIED
            until_s = ctx.now_s + wait_s if may_be_asked else None
            note = replace(note, until_s=until_s, times=times + 1)
        notes[node.node] = note
    kept = tuple(known for known in job.misfits if known.node not in notes)
    return replace(job, misfits=(*kept, *notes.values()))


def _may_come_to_fit(job: JobRecord, node: NodeRecord) -> bool:
    """Whether a node has what the job needs, be it in use now or not."""
    return fits(job, node, math.inf)
