"""What is kept of jobs that have ended, of incidents of those that go on, and of former nodes.

A controller that lives for years would hold every job, incident, step and node that ever was: in
memory, in each snapshot of the journal, in the tables of loss curves. A cluster may give each node
a new name, and an incident that waits for nodes gets lines for each that does not fit. What may
go is decided here, by age and by size; when it goes, and where it is archived before, is
`controller.retention`.

What does not belong here: checkpoints, which are the user's, and what agents keep on their nodes
(`controller.agent.observe.leftovers`, `controller.agent.observe.pruning`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile

from controller.core import fleet
from controller.core.changes import IncidentsPruned, JobPruned, State
from controller.core.context import Context
from controller.core.events import RecordsExpired
from controller.core.incident_cut import BEGINNING, IncidentCut, shortened
from controller.core.incident_record import IncidentRecord
from controller.core.node_events import NodeForgetRequested
from controller.core.records import JobRecord
from controller.core.states import AWAY, TERMINAL, IncidentState
from outlast.ids import IncidentId, JobId, NodeId

# One look prunes so many: each is archived first, and the loop has other things to do.
MAX_AT_ONCE = 32
# With an archive each cut is a file: an incident with a new line each minute has three an hour.
_LEAST_CUT = 20
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a controller keeps; `retention` in its configuration."""

    ended_jobs_days: float = 90.0
    """Days after its end for which a job is listed, with its incidents and its loss curve."""
    ended_jobs: int = 1_000
    """Ended jobs that are kept at most; the oldest go first."""
    curve_steps: int = 100_000_000
    """Steps in the loss curves of ended jobs, at about 120 bytes each, or 210 where the parts of
    a step are known; the oldest jobs go first."""
    incidents_per_job: int = 1_000
    """Closed incidents of a job that has not ended; the oldest go first."""
    incident_lines: int = 1_000
    """Lines in the timeline of an open incident, and signs of it that are older than a day; the
    oldest after the first 100 go first."""
    incident_lines_days: float = 90.0
    """Days for which those lines and signs are kept."""
    former_nodes: int = 1_000
    """Retired and released nodes that are kept at most; the oldest go first."""
    former_nodes_days: float = 30.0
    """Days for which a node is listed that was retired or released and has not come back."""
    archive_url: str = ""
    """Where all of this is written before they are deleted: a folder or an fsspec URL."""

    def __post_init__(self) -> None:
        for name in ("ended_jobs_days", "incident_lines_days", "former_nodes_days"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"retention.{name} is {getattr(self, name):g}; allowed: more than 0 days"
                )
        for name, least in (
            ("ended_jobs", 1),
            ("curve_steps", 1),
            ("incidents_per_job", 10),
            ("incident_lines", 2 * BEGINNING),
            ("former_nodes", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"retention.{name} is {getattr(self, name)}; allowed: {least} or more"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """What is to be deleted, oldest first."""

    jobs: tuple[JobId, ...] = ()
    incidents: tuple[IncidentId, ...] = ()
    cuts: tuple[IncidentCut, ...] = ()
    nodes: tuple[NodeId, ...] = ()

    def __len__(self) -> int:
        return len(self.jobs) + len(self.incidents) + len(self.cuts) + len(self.nodes)


def expired(
    state: State,
    limits: Retention,
    now_s: float,
    *,
    may_forget: Callable[[NodeId], bool] = lambda node: True,
) -> Expired:
    """What is older, or more, than is kept; `may_forget`: of a former node, whether it may go."""
    return Expired(
        jobs=_expired_jobs(state, limits, now_s)[:MAX_AT_ONCE],
        incidents=tuple(
            incident
            for job in state.live_jobs()
            for incident in _expired_incidents(state, job, limits.incidents_per_job)
        )[: MAX_AT_ONCE * 8],
        cuts=_cuts(state, limits, now_s)[:MAX_AT_ONCE],
        nodes=tuple(islice(filter(may_forget, _expired_nodes(state, limits, now_s)), MAX_AT_ONCE)),
    )


def may_prune(state: State, job_id: JobId) -> bool:
    """Whether the job has ended, and nothing is to be done for it any more."""
    job = state.jobs.get(job_id)
    if job is None or job.state not in TERMINAL:
        return False
    index = state.index
    if any(index.of_job.get((kind, job_id)) for kind in index.of_kind):
        return False
    if any(not _is_closed(incident) for incident in state.incidents_of(job)):
        return False
    # A node that is only silent gets the order to forget the job when it is back.
    nodes = (state.nodes.get(node) for node in job.held_by)
    return all(node is None or node.state in AWAY for node in nodes)


def prune(ctx: Context, event: RecordsExpired) -> None:
    """Delete what has expired, if it still may be."""
    for job_id in event.jobs:
        if may_prune(ctx.state, job_id):
            job = ctx.state.jobs[job_id]
            incidents = tuple(each.incident for each in ctx.state.incidents_of(job))
            ctx.record(JobPruned(job_id=job_id, incidents=incidents))
            ctx.looks.pop(job_id, None)
            ctx.allowed_s.pop(job_id, None)
            ctx.aside.pop(job_id, None)
    known = (ctx.state.incidents.get(incident) for incident in event.incidents)
    closed = tuple(each.incident for each in known if each is not None and _may_go(ctx.state, each))
    if closed:
        ctx.record(IncidentsPruned(incidents=closed))
    for cut in event.cuts:
        incident = ctx.state.incidents.get(cut.incident)
        if incident is not None and shortened(incident, cut) != incident:
            ctx.record(cut)
    for node in event.nodes:
        fleet.forget_requested(ctx, NodeForgetRequested(node=node))


def _expired_jobs(state: State, limits: Retention, now_s: float) -> tuple[JobId, ...]:
    ended = [job for job in state.jobs.values() if job.state in TERMINAL]
    ended.sort(key=_ended_s, reverse=True)
    found: list[JobId] = []
    num_steps = 0
    for index, job in enumerate(ended):
        num_steps += job.high_step
        is_old = now_s - _ended_s(job) > limits.ended_jobs_days * _DAY_S
        if is_old or index >= limits.ended_jobs or num_steps > limits.curve_steps:
            found.append(job.job_id)
    return tuple(job_id for job_id in reversed(found) if may_prune(state, job_id))


def _expired_incidents(state: State, job: JobRecord, most: int) -> list[IncidentId]:
    if job.num_incidents <= most:
        return []
    closed = [each for each in state.incidents_of(job) if _may_go(state, each)]
    return [each.incident for each in closed[: max(0, len(closed) - most)]]


def _cuts(state: State, limits: Retention, now_s: float) -> tuple[IncidentCut, ...]:
    """Of open incidents, the longest first: the others get no more lines and signs."""
    old_s = now_s - limits.incident_lines_days * _DAY_S
    found: list[IncidentCut] = []
    for incident in map(state.incidents.__getitem__, state.index.open_incidents):
        most = limits.incident_lines
        lines = _num_expired([line.at_s for line in incident.timeline], most, now_s, old_s)
        # Hundreds of nodes may be lost at once, and what is decided depends on each of them.
        signs = _num_expired([sign.at_s for sign in incident.evidence], most, now_s - _DAY_S, old_s)
        # Of nodes that nobody knows any more.
        unknown = tuple(node for node, _ in incident.findings[:-most] if node not in state.nodes)
        if lines + signs + len(unknown) >= _LEAST_CUT:
            cut = IncidentCut(incident=incident.incident, lines=lines, signs=signs, nodes=unknown)
            found.append(cut)
    found.sort(key=lambda cut: cut.lines + cut.signs + len(cut.nodes), reverse=True)
    return tuple(found)


def _num_expired(times_s: list[float], most: int, surplus_s: float, old_s: float) -> int:
    """How many go after the beginning: those before `old_s`, and of those before `surplus_s` so
    many that `most` remain.
    """
    surplus = len(times_s) - most
    rest = enumerate(times_s[BEGINNING:])
    # The newest come last.
    expired_ones = takewhile(
        lambda each: each[1] < old_s or (each[0] < surplus and each[1] <= surplus_s), rest
    )
    return sum(1 for _ in expired_ones)


def _expired_nodes(state: State, limits: Retention, now_s: float) -> list[NodeId]:
    former = sorted(map(state.nodes.__getitem__, state.index.away), key=lambda node: node.since_s)
    surplus = len(former) - limits.former_nodes
    oldest_s = now_s - limits.former_nodes_days * _DAY_S
    return [
        node.node for index, node in enumerate(former) if index < surplus or node.since_s < oldest_s
    ]


def _may_go(state: State, incident: IncidentRecord) -> bool:
    job = state.jobs.get(incident.job)
    return _is_closed(incident) and (job is None or job.incident != incident.incident)


def _is_closed(incident: IncidentRecord) -> bool:
    return incident.state is IncidentState.CLOSED


def _ended_s(job: JobRecord) -> float:
    return job.since_s if job.finished_s is None else job.finished_s
