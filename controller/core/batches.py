"""What one commit of the journal writes: what a batch of state changes comes to.

A fault moves a job through several states within one batch, thousands of ranks end in one, and
the same order goes to every node. None of what lies between is ever seen: a batch is durable
as a whole or not at all. So of several records of one thing the last is written, signs that were
added to an incident are joined to it, and what is the same for many ranks or nodes is written once.
Of a record that the journal has already, only the fields are written that have changed.

What does not belong here: changes that must be seen one by one (the log, the watch); they take the
batch as it was decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TypeVar, assert_never

from controller.core.changes import (
    AttemptPut,
    CheckpointStored,
    CheckpointWaited,
    CommandClosed,
    CommandOpened,
    IncidentGrown,
    IncidentPut,
    IncidentsPruned,
    JobExplained,
    JobForgotten,
    JobPruned,
    JobPut,
    NodeChecked,
    NodeForgotten,
    NodePut,
    RanksDone,
    StateChange,
    grown,
    growth,
)
from controller.core.frozen import replace
from controller.core.incident_cut import IncidentCut
from controller.core.incident_record import IncidentRecord
from controller.core.orders import CommandRecord
from controller.core.written import (
    CommandsClosed,
    CommandsOpened,
    RecordChanged,
    RecordKind,
    changed,
    difference,
)
from outlast.ids import IncidentId, JobId, NodeId

_Id = TypeVar("_Id", JobId, NodeId, IncidentId)
# Fields of an incident that are added to.
_GROWING = tuple(item.name for item in fields(IncidentGrown) if item.name != "incident")


def compacted(changes: Iterable[StateChange]) -> list[StateChange]:
    """Fewer changes that fold into the same state, tables in the same order."""
    batch = _Batch()
    for change in changes:
        batch.take(change)
    return [lean for change in batch.joined() for lean in _changes(change)]


@dataclass(slots=True)
class _Batch:
    """The changes so far, and where those are that a later one may change."""

    changes: list[StateChange] = field(default_factory=list)
    # Places in `changes`. A change that depends on one of these makes it final.
    jobs: dict[JobId, int] = field(default_factory=dict)
    nodes: dict[NodeId, int] = field(default_factory=dict)
    incidents: dict[IncidentId, int] = field(default_factory=dict)
    reasons: dict[JobId, int] = field(default_factory=dict)
    done: dict[JobId, int] = field(default_factory=dict)
    # Of the newest command, if nothing has happened to commands since; what it says to any node.
    command: int | None = None
    order: CommandsOpened | None = None
    # Of answers since the last command, by what their ids begin with and what they say.
    closed: dict[tuple[str, str], int] = field(default_factory=dict)
    # What changes at these indexes are for besides the first one: nodes, names or ranks. Thousands
    # come one by one, so they are gathered in lists and joined when the batch is over.
    more_nodes: dict[int, list[NodeId]] = field(default_factory=dict)
    more_names: dict[int, list[str]] = field(default_factory=dict)
    more_ranks: dict[int, list[int]] = field(default_factory=dict)

    def joined(self) -> list[StateChange]:
        """The changes, those that say the same of many nodes or ranks as one."""
        for index, nodes in self.more_nodes.items():
            orders = _as_orders(self.changes[index])
            assert orders is not None
            self.changes[index] = replace(orders, nodes=(*orders.nodes, *nodes))
        for index, names in self.more_names.items():
            first = self.changes[index]
            assert isinstance(first, CommandClosed)
            prefix, name = _split_id(first)
            self.changes[index] = CommandsClosed(
                id_prefix=prefix, names=(name, *names), why=first.why
            )
        for index, ranks in self.more_ranks.items():
            done = self.changes[index]
            assert isinstance(done, RanksDone)
            self.changes[index] = replace(done, ranks=(*done.ranks, *ranks))
        return self.changes

    def take(self, change: StateChange) -> None:
        match change:
            case JobPut():
                self._put_job(change)
            case NodePut(node=node):
                self._put(self.nodes, node.node, change)
            case IncidentPut(incident=incident):
                index = self.incidents.get(incident.incident)
                if index is not None and isinstance(self.changes[index], IncidentGrown):
                    # What it was before has what was added there.
                    del self.incidents[incident.incident]
                self._put(self.incidents, incident.incident, change)
            case IncidentGrown():
                self._grow(change)
            case JobExplained():
                self._explain(change)
            case RanksDone(job_id=job_id):
                self.jobs.pop(job_id, None)
                self._add_ranks(change)
            case CommandOpened(command=command):
                self._open(change, command)
            case CommandClosed():
                self._close(change)
            case CommandsOpened() | CommandsClosed() | RecordChanged():
                raise AssertionError(f"{change} is what this makes")
            case NodeForgotten(node=node_id):
                self.nodes.pop(node_id, None)
                # One that comes back under its name has orders of its own.
                self.command = None
                self.changes.append(change)
            case (
                NodeChecked(job_id=job_id)
                | JobForgotten(job_id=job_id)
                | CheckpointStored(job_id=job_id)
                | CheckpointWaited(job_id=job_id)
            ):
                self.jobs.pop(job_id, None)
                self.changes.append(change)
            case JobPruned() | IncidentsPruned() | IncidentCut():
                self._prune(change)
            case AttemptPut():
                self.changes.append(change)
            case _:
                assert_never(change)

    def _put(self, indexes: dict[_Id, int], key: _Id, change: StateChange) -> None:
        """The record of something: the last one takes the place of the first."""
        index = indexes.get(key)
        if index is None:
            indexes[key] = len(self.changes)
            self.changes.append(change)
        else:
            self.changes[index] = _since(self.changes[index], change)

    def _prune(self, change: JobPruned | IncidentsPruned | IncidentCut) -> None:
        pruned = (change.incident,) if isinstance(change, IncidentCut) else change.incidents
        for incident in pruned:
            self.incidents.pop(incident, None)
        if isinstance(change, JobPruned):
            for table in (self.jobs, self.reasons, self.done):
                table.pop(change.job_id, None)
        self.changes.append(change)

    def _put_job(self, change: JobPut) -> None:
        job = change.job
        index = self.jobs.get(job.job_id)
        before = None if index is None else self.changes[index]
        if isinstance(before, JobPut) and before.job.attempt != job.attempt:
            # With an attempt ends what its ranks have done.
            del self.jobs[job.job_id]
        self._put(self.jobs, job.job_id, change)
        self.reasons.pop(job.job_id, None)
        self.done.pop(job.job_id, None)

    def _grow(self, change: IncidentGrown) -> None:
        index = self.incidents.get(change.incident)
        before = None if index is None else self.changes[index]
        joined: StateChange = change
        if isinstance(before, IncidentPut):
            joined = replace(before, incident=grown(before.incident, change))
        elif isinstance(before, IncidentGrown):
            joined = replace(
                change,
                evidence=before.evidence + change.evidence,
                timeline=before.timeline + change.timeline,
                findings=before.findings + change.findings,
            )
        self._put(self.incidents, change.incident, joined)

    def _explain(self, change: JobExplained) -> None:
        index = self.jobs.get(change.job_id)
        before = None if index is None else self.changes[index]
        if isinstance(before, JobPut) and index is not None:
            self.changes[index] = replace(before, job=replace(before.job, reason=change.reason))
        else:
            self._put(self.reasons, change.job_id, change)

    def _add_ranks(self, change: RanksDone) -> None:
        index = self.done.get(change.job_id)
        if index is None:
            self.done[change.job_id] = len(self.changes)
            self.changes.append(change)
        else:
            self.more_ranks.setdefault(index, []).extend(change.ranks)

    def _open(self, change: CommandOpened, command: CommandRecord) -> None:
        """An order that differs from the one before in its node only is written with that."""
        # An id that was answered may be given out again.
        self.closed.clear()
        orders = _as_orders(change)
        order = None if orders is None else replace(orders, nodes=())
        if self.command is not None and order is not None and order == self.order:
            self.more_nodes.setdefault(self.command, []).append(command.node)
            return
        self.order = order
        self.command = len(self.changes)
        self.changes.append(change)

    def _close(self, change: CommandClosed) -> None:
        """Answers that say the same are written with the first of them.

        What lies between does not ask which commands are open, unless it opens one.
        """
        self.command = None
        prefix, name = _split_id(change)
        key = (prefix, change.why)
        index = self.closed.get(key)
        if index is None:
            self.closed[key] = len(self.changes)
            self.changes.append(change)
        else:
            self.more_names.setdefault(index, []).append(name)


def _since(first: StateChange, last: StateChange) -> StateChange:
    """The last record of something, as a change of what it was before the first one."""
    match first, last:
        case JobPut(), JobPut():
            return replace(last, before=first.before)
        case NodePut(), NodePut():
            return replace(last, before=first.before)
        case IncidentPut(), IncidentPut():
            return replace(last, before=first.before)
        case _:
            return last


def _changes(change: StateChange) -> Iterator[StateChange]:
    """A record as what has changed of it; any other change as it is."""
    match change:
        case JobPut(job=job, before=before) if before is not None:
            values = difference(before, job)
            yield RecordChanged(kind=RecordKind.JOB, key=job.job_id, values=values)
        case NodePut(node=node, before=was) if was is not None:
            values = difference(was, node)
            yield RecordChanged(kind=RecordKind.NODE, key=node.node, values=values)
        case IncidentPut(incident=incident, before=old) if old is not None:
            yield from _incident_changes(old, incident)
        case _:
            yield change


def _incident_changes(before: IncidentRecord, after: IncidentRecord) -> Iterator[StateChange]:
    """What was added apart from the rest: of hundreds of signs those that are new are written."""
    values = difference(before, after)
    rest = tuple((name, value) for name, value in values if name not in _GROWING)
    added = growth(changed(before, rest), after)
    if added is None:
        rest = values
    if rest:
        yield RecordChanged(kind=RecordKind.INCIDENT, key=after.incident, values=rest)
    if added is not None and len(rest) < len(values):
        yield added


def _split_id(change: CommandClosed) -> tuple[str, str]:
    """The id of an answered command before its last name, which is that of its node as a rule."""
    prefix, slash, name = change.command_id.rpartition("/")
    return prefix + slash, name


def _as_orders(change: StateChange) -> CommandsOpened | None:
    """A command as one for many nodes; None for any other change, and where its id has no node."""
    if not isinstance(change, CommandOpened):
        return None
    command = change.command
    prefix = command.command_id.removesuffix(command.node)
    if prefix + command.node != command.command_id:
        return None
    return CommandsOpened(
        id_prefix=prefix,
        nodes=(command.node,),
        job=command.job,
        attempt=command.attempt,
        issued_s=command.issued_s,
        command=command.command,
    )
