"""State changes: the journal's vocabulary, and the state that they fold into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import assert_never

from controller.core import accounting
from controller.core.attempt_record import AttemptRecord
from controller.core.frozen import replace
from controller.core.incident_cut import IncidentCut, shortened
from controller.core.incident_record import Evidence, IncidentRecord, TimelineEntry
from controller.core.index import Index
from controller.core.orders import CommandRecord
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import TERMINAL
from controller.core.written import (
    CommandsClosed,
    CommandsOpened,
    RecordChanged,
    RecordKind,
    changed,
)
from outlast.ids import CommandId, IncidentId, JobId, NodeId, incident_id

# What a record was before, so that the journal can write what has changed; None: write all of it.
NOT_WRITTEN = {"written": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPut:
    """This is the job now."""

    job: JobRecord
    before: JobRecord | None = field(default=None, compare=False, repr=False, metadata=NOT_WRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePut:
    """This is the node now."""

    node: NodeRecord
    before: NodeRecord | None = field(default=None, compare=False, repr=False, metadata=NOT_WRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgotten:
    """A node that was given up is on no list any more."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPut:
    """This is the incident now."""

    incident: IncidentRecord
    before: IncidentRecord | None = field(
        default=None, compare=False, repr=False, metadata=NOT_WRITTEN
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPut:
    """This is the job's newest attempt now."""

    attempt: AttemptRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOpened:
    """This command is to be carried out."""

    command: CommandRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandClosed:
    """The command was answered, or nothing depends on it any more."""

    command_id: CommandId
    why: str


# What thousands of nodes and ranks say of one job: each a change of a few bytes. With the whole
# job in each, the journal would grow with the square of the nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExplained:
    """Why the job is in its present state has changed, and nothing else."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChecked:
    """The job's next start need not wait for the checks of this node any more."""

    job_id: JobId
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForgotten:
    """The node keeps nothing of the job any more."""

    job_id: JobId
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksDone:
    """These ranks of the job's present attempt have completed all steps."""

    job_id: JobId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStored:
    """A newer checkpoint of the job is in storage: what that changes in the job."""

    job_id: JobId
    committed_step: int
    high_step: int
    retry_left: int
    faults_in_row: int
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWaited:
    """Training has waited for copies to host memory, `more_s` since that was last noted."""

    job_id: JobId
    more_s: float
    at_s: float
    # In the present attempt so far.
    stalled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentGrown:
    """Signs, lines or findings were added to the incident, and nothing else has changed."""

    incident: IncidentId
    fault_s: float
    evidence: tuple[Evidence, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    findings: tuple[tuple[NodeId, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPruned:
    """An ended job is older, or one more, than is kept; with all its incidents."""

    job_id: JobId
    incidents: tuple[IncidentId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentsPruned:
    """These incidents of jobs that go on are more than are kept."""

    incidents: tuple[IncidentId, ...]


StateChange = (
    JobPut
    | NodePut
    | NodeForgotten
    | IncidentPut
    | AttemptPut
    | CommandOpened
    | CommandClosed
    | JobExplained
    | NodeChecked
    | JobForgotten
    | RanksDone
    | CheckpointStored
    | CheckpointWaited
    | IncidentGrown
    | CommandsOpened
    | CommandsClosed
    | RecordChanged
    | JobPruned
    | IncidentsPruned
    | IncidentCut
)


@dataclass(slots=True)
class State:
    """Everything decided so far. Dicts keep insertion order; nothing iterates a set."""

    jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    nodes: dict[NodeId, NodeRecord] = field(default_factory=dict)
    incidents: dict[IncidentId, IncidentRecord] = field(default_factory=dict)
    # The newest one of each job.
    attempts: dict[JobId, AttemptRecord] = field(default_factory=dict)
    commands: dict[CommandId, CommandRecord] = field(default_factory=dict)
    # Ranks of each job's present attempt that have completed all steps.
    done: dict[JobId, dict[int, None]] = field(default_factory=dict)
    index: Index = field(default_factory=Index, compare=False, repr=False)

    def apply(self, change: StateChange) -> None:
        """Take one change in: nothing else changes a state."""
        match change:
            case JobPut(job=job):
                self._put_job(job)
            case NodePut(node=node):
                self.index.put_node(self.nodes.get(node.node), node)
                self.nodes[node.node] = node
            case NodeForgotten(node=node_id):
                if self.nodes.pop(node_id, None) is not None:
                    self.index.forget_node(node_id)
            case IncidentPut(incident=incident):
                self.incidents[incident.incident] = incident
                self.index.put_incident(incident)
            case AttemptPut(attempt=attempt):
                self.attempts[attempt.job] = attempt
            case IncidentGrown(incident=incident_id):
                self.incidents[incident_id] = grown(self.incidents[incident_id], change)
            case RecordChanged():
                self.apply(self._as_put(change))
            case CommandOpened(command=command):
                self._open(command)
            case CommandsOpened():
                for command in change.one_by_one():
                    self._open(command)
            case CommandClosed(command_id=command_id):
                self._close(command_id)
            case CommandsClosed(id_prefix=prefix, names=names):
                for each in names:
                    self._close(CommandId(prefix + each))
            case JobExplained() | NodeChecked() | JobForgotten():
                self._change_job(change)
            case RanksDone(job_id=job_id, ranks=ranks):
                self.done.setdefault(job_id, {}).update(dict.fromkeys(ranks))
            case CheckpointStored(job_id=job_id):
                self.jobs[job_id] = with_checkpoint(self.jobs[job_id], change)
            case CheckpointWaited(job_id=job_id):
                self.jobs[job_id] = having_waited(self.jobs[job_id], change)
            case JobPruned(job_id=job_id, incidents=pruned):
                self._prune_job(job_id, pruned)
            case IncidentsPruned(incidents=pruned):
                for incident_id in pruned:
                    self.incidents.pop(incident_id, None)
            case IncidentCut(incident=incident_id):
                self.incidents[incident_id] = shortened(self.incidents[incident_id], change)
            case _:
                assert_never(change)

    def _change_job(self, change: JobExplained | NodeChecked | JobForgotten) -> None:
        job = self.jobs[change.job_id]
        match change:
            case JobExplained(reason=reason):
                self.jobs[job.job_id] = replace(job, reason=reason)
            case NodeChecked(node=name):
                self.jobs[job.job_id] = replace(job, unchecked=_others(job.unchecked, name))
            case JobForgotten(node=name):
                self.jobs[job.job_id] = job = replace(job, held_by=_others(job.held_by, name))
                self.index.put_job(job)
            case _:
                assert_never(change)

    def _as_put(self, change: RecordChanged) -> JobPut | NodePut | IncidentPut:
        """The whole record of which the journal has what changed."""
        match change.kind:
            case RecordKind.JOB:
                return JobPut(job=changed(self.jobs[JobId(change.key)], change.values))
            case RecordKind.NODE:
                return NodePut(node=changed(self.nodes[NodeId(change.key)], change.values))
            case RecordKind.INCIDENT:
                incident = self.incidents[IncidentId(change.key)]
                return IncidentPut(incident=changed(incident, change.values))
            case _:
                assert_never(change.kind)

    def _prune_job(self, job_id: JobId, incidents: tuple[IncidentId, ...]) -> None:
        for incident in incidents:
            self.incidents.pop(incident, None)
        self.jobs.pop(job_id, None)
        self.attempts.pop(job_id, None)
        self.done.pop(job_id, None)
        self.index.forget_job(job_id)

    def _open(self, command: CommandRecord) -> None:
        self.commands[command.command_id] = command
        self.index.open_command(command)

    def _close(self, command_id: CommandId) -> None:
        closed = self.commands.pop(command_id, None)
        if closed is not None:
            self.index.close_command(closed)

    def _put_job(self, job: JobRecord) -> None:
        before = self.jobs.get(job.job_id)
        is_other = before is not None and before.attempt != job.attempt
        if is_other or job.state in TERMINAL:
            self.done.pop(job.job_id, None)
        if job.done_ranks and job.state not in TERMINAL:
            # The journal of a version that kept them in the job.
            self.done[job.job_id] = dict.fromkeys(job.done_ranks)
        self.jobs[job.job_id] = replace(job, done_ranks=()) if job.done_ranks else job
        self.index.put_job(job)

    def live_jobs(self) -> list[JobRecord]:
        """Jobs that have not ended, in the order of all jobs."""
        return [self.jobs[job_id] for job_id in self.index.live_jobs]

    def incidents_of(self, job: JobRecord) -> Iterator[IncidentRecord]:
        """All that are known of a job, oldest first."""
        for number in range(1, job.num_incidents + 1):
            incident = self.incidents.get(incident_id(job.job_id, number))
            if incident is not None:
                yield incident

    def become(self, other: State) -> None:
        """Hold what `other` holds, so that whoever refers to this state sees it."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def as_changes(self) -> list[StateChange]:
        """Changes that rebuild this state from nothing: a snapshot."""
        return [
            *(JobPut(job=job) for job in self.jobs.values()),
            *(NodePut(node=node) for node in self.nodes.values()),
            *(IncidentPut(incident=incident) for incident in self.incidents.values()),
            *(AttemptPut(attempt=attempt) for attempt in self.attempts.values()),
            *(CommandOpened(command=command) for command in self.commands.values()),
            *(RanksDone(job_id=job, ranks=tuple(ranks)) for job, ranks in self.done.items()),
        ]


def fold(changes: Iterable[StateChange]) -> State:
    """The state that a journal describes."""
    state = State()
    for change in changes:
        state.apply(change)
    return state


def with_checkpoint(job: JobRecord, change: CheckpointStored) -> JobRecord:
    """The job once its newest checkpoint is known."""
    stored = replace(job, committed_step=change.committed_step, committed_s=change.at_s)
    stored = replace(stored, high_step=change.high_step, retry_left=change.retry_left)
    return replace(stored, faults_in_row=change.faults_in_row)


def having_waited(job: JobRecord, change: CheckpointWaited) -> JobRecord:
    """The job once its waits for host memory are accounted for."""
    account = accounting.stalled(job.account, change.more_s, change.at_s)
    return replace(job, account=account, stalled_s=change.stalled_s)


def grown(incident: IncidentRecord, change: IncidentGrown) -> IncidentRecord:
    """The incident with what was added to it."""
    return replace(
        incident,
        fault_s=change.fault_s,
        evidence=incident.evidence + change.evidence,
        timeline=incident.timeline + change.timeline,
        findings=incident.findings + change.findings,
    )


# Of an incident, what an `IncidentGrown` adds to, and what it does not change.
_ADDED = ("evidence", "timeline", "findings")
_added = attrgetter(*_ADDED)
_fixed = attrgetter(*({item.name for item in fields(IncidentRecord)} - {"fault_s", *_ADDED}))


def growth(old: IncidentRecord, new: IncidentRecord) -> IncidentGrown | None:
    """What was added to an incident; None when anything else of it has changed."""
    pairs = zip(_added(old), _added(new), strict=True)
    if _fixed(old) != _fixed(new) or any(now[: len(was)] != was for was, now in pairs):
        return None
    return IncidentGrown(
        incident=new.incident,
        fault_s=new.fault_s,
        evidence=new.evidence[len(old.evidence) :],
        timeline=new.timeline[len(old.timeline) :],
        findings=new.findings[len(old.findings) :],
    )


def _others(nodes: tuple[NodeId, ...], node: NodeId) -> tuple[NodeId, ...]:
    """The other nodes, found quickly: they may be thousands, and so are the answers."""
    if node not in nodes:
        return nodes
    index = nodes.index(node)
    return nodes[:index] + nodes[index + 1 :]
