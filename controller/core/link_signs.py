"""What is known of links when all ranks of a job stand or are slow.

Ranks that all entered an operation look alike. A link that carries less than it did, or at other
times, while those beside it go on (`traffic`) is the only sign then that is of one node.
"""

from __future__ import annotations

from controller.core.context import Context
from controller.core.frozen import replace
from controller.core.hang_signs import MAX_TOLD
from controller.core.incident_record import Evidence
from controller.core.kinds import Cause
from controller.core.records import JobRecord
from controller.core.states import IncidentState
from outlast.ids import NodeId


def known(ctx: Context, job: JobRecord) -> dict[NodeId, str]:
    """What is wrong with links of the job's nodes now, in words, by node."""
    found = {}
    for incident in ctx.open_incidents():
        first, newest = incident.evidence[0], incident.evidence[-1]
        is_open = incident.state is IncidentState.OPEN and incident.cause is Cause.TRAFFIC
        is_of_job = (incident.job, incident.attempt) == (job.job_id, job.attempt)
        if is_open and is_of_job and first.node is not None and first.node in job.nodes:
            found[first.node] = newest.detail
    return found


def told(sign: Evidence, links: dict[NodeId, str]) -> Evidence:
    """A sign that also says which links are in trouble."""
    parts = [f"on {node}: {what}" for node, what in [*links.items()][:MAX_TOLD]]
    return replace(sign, detail="; ".join([sign.detail, *parts]))
