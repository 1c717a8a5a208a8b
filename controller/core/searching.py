"""The search for what is at fault, between a fault and the restart.

It is an intent like a command: noted in the incident before it is asked for, and
open until its result has come. The one who carries it out lives in this process,
so after a restart of the controller an open search is asked for again; what comes
of another one is recognised by its id and dropped.
"""

from __future__ import annotations

from controller.core import nodes
from controller.core.context import Context
from controller.core.effects import EndSearch, SearchFaults
from controller.core.events import FaultsSearched
from controller.core.frozen import replace
from controller.core.incident_record import IncidentRecord
from controller.core.records import JobRecord
from controller.core.states import FREE, JobState, NodeState
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
    ctx.put(replace(incident, search=f"{incident.incident}.d1", is_searched=False))


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
    if not reachable or job.deadline_s is None:
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
            # Asked again by a later controller, it has what is left.
            timeout_s=_SHARE_OF_PATIENCE * (job.deadline_s - ctx.now_s),
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
    own = frozenset(job.nodes)
    reported = [found for found in event.nodes if found.node in own]
    incident = ctx.put(
        replace(
            incident,
            is_searched=True,
            findings=tuple((found.node, found.verdict) for found in reported),
            figures=tuple((f.node, f.figure) for f in reported if f.figure is not None),
            bad_links=tuple(link for link in event.links if own.issuperset(link)),
            corrupt=tuple(found.node for found in reported if found.is_corrupt),
        )
    )
    summary = f"{len(event.nodes)} nodes checked; {len(event.links)} bad links"
    incident = ctx.note(incident, "diagnostics", summary)
    notes = [f"{f.node}: {f.verdict}: {f.detail}" for f in reported if f.verdict not in _QUIET]
    notes += [f"bad link {one}--{other}" for one, other in event.links]
    for note in notes[:_MAX_NOTES]:
        incident = ctx.note(incident, "diagnostics", note)
    is_replacing = any(found.verdict == "fail" for found in reported) or bool(incident.bad_links)
    for found in event.nodes:
        spare = ctx.state.nodes.get(found.node)
        if found.verdict != "fail" or spare is None or spare.state not in FREE:
            continue
        # It must not take the place of a node that was found bad with it, and the breaker's
        # room is for that node first.
        keep_out = nodes.cordon if is_replacing else nodes.keep_out
        keep_out(ctx, spare, f"failed its checks in search {event.search}: {found.detail}")


def give_up(ctx: Context, job: JobRecord, why: str) -> None:
    """The result is awaited no longer: nothing is known of any node."""
    incident = ctx.incident_of(job)
    if incident is None or not is_open(incident):
        return
    unknown = tuple((node, "inconclusive") for node in job.nodes if node is not None)
    incident = ctx.put(replace(incident, is_searched=True, findings=unknown))
    ctx.note(incident, "diagnostics", why)
    ctx.emit(EndSearch(search=incident.search))


def _spares(ctx: Context, job: JobRecord) -> tuple[NodeId, ...]:
    """Checked standbys: partners for nodes that none of the job's own can clear."""
    return tuple(
        node.node
        for node in ctx.state.nodes.values()
        if node.state is NodeState.STANDBY and not node.cordoned and ctx.connected(node.node)
    )[:2]
