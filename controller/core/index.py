"""Where to look: what the state's tables hold, by what is asked of them.

A fleet of ten thousand nodes answers ten thousand stop orders after each fault, and the
machine looks at the state after each of them. So it must find the few nodes that wait for
something, and a node's or a job's open commands, without going through all there are.
Follows from the state changes alone; nothing here is decided, journalled or compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.core.attempt_record import AttemptRecord
from controller.core.incident_record import IncidentRecord
from controller.core.orders import Command, CommandRecord
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import AWAY, EXCLUDED, FREE, TERMINAL, IncidentState, NodeState
from outlast.ids import CommandId, IncidentId, JobId, NodeId

# In these a node trains or leaves; neither time nor a check brings it on.
_BUSY = (NodeState.ASSIGNED, NodeState.DRAINING)
_HELD = (NodeState.ASSIGNED, NodeState.SUSPECT)
# An ordered set: a set has no order that a replay could rely on.
_Ids = dict[CommandId, None]


@dataclass(slots=True)
class _InOrder:
    """Some of the nodes, in the order in which all of them first came."""

    order: dict[NodeId, int]
    members: dict[NodeId, None] = field(default_factory=dict)
    # The members in order; None when one has come or gone since.
    _sorted: tuple[NodeId, ...] | None = None

    def put(self, node: NodeId, is_member: bool) -> None:
        if is_member is (node in self.members):
            return
        self._sorted = None
        if is_member:
            self.members[node] = None
        else:
            del self.members[node]

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, node: NodeId) -> bool:
        return node in self.members

    def __iter__(self) -> Iterator[NodeId]:
        if self._sorted is None:
            self._sorted = tuple(sorted(self.members, key=self.order.__getitem__))
        return iter(self._sorted)


@dataclass(slots=True)
class Index:
    """Ids by what is asked for, each in the order of the changes."""

    # Number of each node, by when it was first put.
    order: dict[NodeId, int] = field(default_factory=dict)
    num_seen: int = 0
    # Nodes out of use or under suspicion: time or a check brings them on.
    waiting: _InOrder = field(init=False)
    free: _InOrder = field(init=False)
    standby: _InOrder = field(init=False)
    # Not excluded from use.
    in_use: _InOrder = field(init=False)
    # Nobody expects to hear of them.
    away: _InOrder = field(init=False)
    # Quarantined lately, or still.
    blamed: _InOrder = field(init=False)
    # Whose agent could not kill its workers once.
    stuck: _InOrder = field(init=False)
    # How many nodes each job holds, but for those that are moving away.
    num_held: dict[JobId, int] = field(default_factory=dict)
    open_incidents: dict[IncidentId, None] = field(default_factory=dict)
    # Jobs that have not ended, and ended ones that some node still keeps something of: what
    # there is to do for a job does not depend on how many others have ended.
    live_jobs: dict[JobId, None] = field(default_factory=dict)
    held_jobs: dict[JobId, None] = field(default_factory=dict)
    of_kind: dict[type[Command], _Ids] = field(default_factory=dict)
    of_job: dict[tuple[type[Command], JobId | None], _Ids] = field(default_factory=dict)
    of_node: dict[NodeId, _Ids] = field(default_factory=dict)
    # Of each job that has not ended: its newest attempt, and each node's index in it.
    node_indexes: dict[JobId, tuple[AttemptRecord, dict[NodeId, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting, self.free, self.standby, self.in_use = (
            _InOrder(self.order) for _ in range(4)
        )
        self.away, self.blamed, self.stuck = (_InOrder(self.order) for _ in range(3))

    def put_node(self, old: NodeRecord | None, node: NodeRecord) -> None:
        if node.node not in self.order:
            self.order[node.node] = self.num_seen
            self.num_seen += 1
        is_free = node.state in FREE
        self.free.put(node.node, is_free)
        self.standby.put(node.node, node.state is NodeState.STANDBY)
        self.waiting.put(node.node, not is_free and node.state not in _BUSY)
        self.in_use.put(node.node, node.state not in EXCLUDED)
        self.away.put(node.node, node.state in AWAY)
        self.blamed.put(node.node, bool(node.quarantines_s))
        self.stuck.put(node.node, node.stuck != "")
        for record, change in ((old, -1), (node, 1)):
            if record is not None and record.job is not None and record.state in _HELD:
                self.num_held[record.job] = self.num_held.get(record.job, 0) + change

    def forget_node(self, node: NodeId) -> None:
        """Of a node that no job holds."""
        tables = (self.waiting, self.free, self.standby, self.in_use)
        for table in (*tables, self.away, self.blamed, self.stuck):
            table.put(node, False)
        self.of_node.pop(node, None)
        del self.order[node]

    def is_idle(self, node: NodeId) -> bool:
        """Whether the node may wait for time, a check or a place: it does not train."""
        return node in self.waiting or node in self.free

    def put_job(self, job: JobRecord) -> None:
        has_ended = job.state in TERMINAL
        _put(self.live_jobs, job.job_id, not has_ended)
        _put(self.held_jobs, job.job_id, has_ended and bool(job.held_by))
        if has_ended:
            self.node_indexes.pop(job.job_id, None)

    def forget_job(self, job_id: JobId) -> None:
        """Of a job that has ended, and for which no command is open."""
        for table in (self.live_jobs, self.held_jobs, self.num_held, self.node_indexes):
            table.pop(job_id, None)
        for kind in self.of_kind:
            self.of_job.pop((kind, job_id), None)

    def node_index(self, attempt: AttemptRecord, node: NodeId) -> int:
        """The index of a node in the newest attempt of a job; thousands of nodes are asked for."""
        return self._node_indexes_of(attempt)[node]

    def is_placed(self, attempt: AttemptRecord, node: NodeId) -> bool:
        """Whether a node has a place in the newest attempt of a job."""
        if attempt.job not in self.live_jobs:
            return node in attempt.nodes
        return node in self._node_indexes_of(attempt)

    def _node_indexes_of(self, attempt: AttemptRecord) -> dict[NodeId, int]:
        known = self.node_indexes.get(attempt.job)
        if known is None or known[0] is not attempt:
            known = (attempt, {name: index for index, name in enumerate(attempt.nodes)})
            if attempt.job in self.live_jobs:
                self.node_indexes[attempt.job] = known
        return known[1]

    def put_incident(self, incident: IncidentRecord) -> None:
        if incident.state is IncidentState.CLOSED:
            self.open_incidents.pop(incident.incident, None)
        else:
            self.open_incidents[incident.incident] = None

    def open_command(self, record: CommandRecord) -> None:
        for ids in self._places(record):
            ids[record.command_id] = None

    def close_command(self, record: CommandRecord) -> None:
        for ids in self._places(record):
            del ids[record.command_id]

    def commands(
        self, kind: type[Command], node: NodeId | None, job: JobId | None
    ) -> list[CommandId]:
        """Ids of open commands; those of a node may be of any kind and job."""
        if node is not None:
            return list(self.of_node.get(node, ()))
        if job is not None:
            return list(self.of_job.get((kind, job), ()))
        return list(self.of_kind.get(kind, ()))

    def _places(self, record: CommandRecord) -> tuple[_Ids, _Ids, _Ids]:
        kind = type(record.command)
        return (
            self.of_kind.setdefault(kind, {}),
            self.of_job.setdefault((kind, record.job), {}),
            self.of_node.setdefault(record.node, {}),
        )


def _put(table: dict[JobId, None], job_id: JobId, is_member: bool) -> None:
    if is_member:
        table[job_id] = None
    else:
        table.pop(job_id, None)
