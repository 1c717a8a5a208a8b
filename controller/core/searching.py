"""The search for what is at fault, between a fault and the restart.

It is an intent like a command: noted in the incident before it is asked for, and
open until its result has come. The one who carries it out lives in this process,
so after a restart of the controller an open search is asked for again; what comes
of another one is recognised by its id and dropped.
"""

from __future__ import annotations

from controller.core import nodes
from controller.core.context import Context
from controller.core.effects import SearchFaults
from controller.core.events import FaultsSearched
from controller.core.records import IncidentRecord, JobRecord
from controller.core.states import JobState, NodeState
from outlast.ids import NodeId

# The searcher keeps its own deadline, and must have reported before the job's patience ends.
_SHARE_OF_PATIENCE = 0.9
# More lines than that nobody reads; the report has all of them.
_MAX_NOTES = 16
_QUIET = ("pass", "warn", "skip")


def begin(ctx: Context, job: JobRecord) -> None:
    """Note that the job's nodes are to be checked."""
    incident = ctx.incident_of(job)
    assert incident is not None, f"job {job.job_id} is DIAGNOSING without an incident"
    ctx.put_incident(incident, search=f"{incident.incident}.d1", is_searched=False)


def is_open(incident: IncidentRecord) -> bool:
    """Whether the result is still awaited."""
    return bool(incident.search) and not incident.is_searched


def ask(ctx: Context, job: JobRecord, incident: IncidentRecord) -> None:
    """Ask for an open search, once in the life of a controller."""
    # After a start, agents need a moment to come back.
    if incident.search in ctx.asked_searches or ctx.reconciling_until_s is not None:
        return
    reachable = tuple(
        node
        for node in job.nodes
        if node is not None and nodes.placed(ctx, job, node) is not None and ctx.connected(node)
    )
    if not reachable:
        return
    ctx.asked_searches.append(incident.search)
    ctx.emit(
        SearchFaults(
            search=incident.search,
            job=job.job_id,
            nodes=reachable,
            spares=_spares(ctx, job),
            suite="on-failure",
            checkpoint_url=job.checkpoint_url,
            timeout_s=_SHARE_OF_PATIENCE * job.plan.diagnose_timeout_s,
        )
    )


def finished(ctx: Context, event: FaultsSearched) -> None:
    """A search has ended; that matters if its job still waits for it."""
    job = ctx.state.jobs.get(event.job_id)
    if job is None or job.state is not JobState.DIAGNOSING:
        return
    incident = ctx.incident_of(job)
    if incident is None or not is_open(incident) or incident.search != event.search:
        return
    told = [found for found in event.nodes if found.node in job.nodes]
    incident = ctx.put_incident(
        incident,
        is_searched=True,
        findings=tuple((found.node, found.verdict) for found in told),
        figures=tuple((f.node, f.figure) for f in told if f.figure is not None),
        bad_links=event.links,
    )
    summary = f"{len(event.nodes)} nodes checked; {len(event.links)} bad links"
    incident = ctx.note(incident, "diagnostics", summary)
    notes = [f"{f.node}: {f.verdict}: {f.detail}" for f in told if f.verdict not in _QUIET]
    notes += [f"bad link {one}--{other}" for one, other in event.links]
    for note in notes[:_MAX_NOTES]:
        incident = ctx.note(incident, "diagnostics", note)


def give_up(ctx: Context, job: JobRecord, why: str) -> None:
    """The result is awaited no longer: nothing is known of any node."""
    incident = ctx.incident_of(job)
    if incident is None or not is_open(incident):
        return
    unknown = tuple((node, "inconclusive") for node in job.nodes if node is not None)
    incident = ctx.put_incident(incident, is_searched=True, findings=unknown)
    ctx.note(incident, "diagnostics", why)


def _spares(ctx: Context, job: JobRecord) -> tuple[NodeId, ...]:
    """Checked standbys: partners for nodes that none of the job's own can clear."""
    return tuple(
        node.node
        for node in ctx.state.nodes.values()
        if node.state is NodeState.STANDBY and not node.cordoned and ctx.connected(node.node)
    )[:2]
