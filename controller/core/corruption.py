"""Host memory that did not hold what was written to it: a fault of its node, whoever found it.

Nothing of the job is lost: the slot is refused, and its state comes from another slot, from
another node or from storage. So the first time is an incident beside training, and the node is
a suspect; where it happens a second time lately, the node is replaced (`policy`).

What does not belong here: wrong results of arithmetic (`reproducing`).
"""

from __future__ import annotations

from controller.core import incidents, jobs, nodes
from controller.core.context import Context
from controller.core.events import Detected
from controller.core.frozen import replace
from controller.core.incident_record import Evidence, IncidentRecord
from controller.core.kinds import Cause, EvidenceKind
from controller.core.records import JobRecord
from controller.core.states import AT_WORK, IncidentState, JobState, NodeState
from outlast.ids import NodeId

# Slots of one rank, and ranks of one node, are found damaged one after another: a restore reads
# them all, however large they are. What comes later than this after the last is damage anew.
SAME_OCCASION_S = 60.0
# Damage that goes on and on is more than one occasion.
LONGEST_OCCASION_S = 600.0


def found(ctx: Context, job: JobRecord, event: Detected) -> None:
    """A slot on this node was refused."""
    if event.node is None or event.node not in (*job.nodes, *job.held_by):
        return
    sign = Evidence(
        kind=EvidenceKind.DETECTED,
        node=event.node,
        rank=event.rank,
        detail=event.detail,
        at_s=event.at_s,
        detected=Cause.SILENT_CORRUPTION,
    )
    last = _last_of(ctx, event.node)
    is_same = last is not None and _is_same_occasion(ctx, last, sign)
    if last is not None and is_same and last.job == job.job_id and _is_open(last):
        ctx.add_evidence(last, sign)
        return
    can_act = job.state in (*AT_WORK, JobState.SUSPENDING) and event.node in job.nodes
    if last is not None and not is_same and can_act:
        again = f"{event.detail}; the second time lately, see {last.incident}"
        jobs.fault(ctx, job, replace(sign, detail=again))
        return
    minutes = ctx.settings.suspect_s / 60
    reason = (
        f"host memory of {event.node} did not hold what was written to it ({event.detail}); what "
        "was damaged is not used: another slot, a copy on another node or storage takes its place. "
        f"If it happens there again within {minutes:g} min, the node is replaced"
    )
    incidents.open_beside(
        ctx, job, sign, cause=Cause.SILENT_CORRUPTION, reason=reason, culprits=(event.node,)
    )
    _suspect(ctx, ctx.state.jobs[job.job_id], event.node, reason)


def is_past(ctx: Context, incident: IncidentRecord) -> bool:
    """Whether an incident of this kind is so long ago that it counts no more."""
    return _is_ours(incident) and ctx.now_s - incident.opened_s > ctx.settings.suspect_s


def _last_of(ctx: Context, node: NodeId) -> IncidentRecord | None:
    """The newest incident of this kind on a node that still counts."""
    ours = (
        incident
        for incident in ctx.state.incidents.values()
        if _is_ours(incident) and incident.evidence[0].node == node and not is_past(ctx, incident)
    )
    return max(ours, key=lambda incident: incident.opened_s, default=None)


def _is_same_occasion(ctx: Context, last: IncidentRecord, sign: Evidence) -> bool:
    """Whether a sign belongs to the newest damage on its node, by the clock of that node."""
    kin = (item.at_s for item in last.evidence if item.detected is sign.detected)
    since_s = sign.at_s - max(kin)
    return since_s <= SAME_OCCASION_S and ctx.now_s - last.opened_s <= LONGEST_OCCASION_S


def _is_ours(incident: IncidentRecord) -> bool:
    return incident.evidence[0].detected is Cause.SILENT_CORRUPTION


def _is_open(incident: IncidentRecord) -> bool:
    return incident.state is IncidentState.OPEN


def _suspect(ctx: Context, job: JobRecord, node_id: NodeId, reason: str) -> None:
    node = nodes.placed(ctx, job, node_id)
    if node is not None and node.state is NodeState.ASSIGNED:
        timer_s = ctx.now_s + ctx.settings.suspect_s
        ctx.move_node(node, NodeState.SUSPECT, reason, timer_s=timer_s)
