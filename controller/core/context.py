"""What one call of the machine works on: state, observations, time, and its output.

What is decided lives in `State` and changes only through `record`, which also puts
them into the batch for the journal. What was merely *seen* (who is connected,
who is late) lives in `NodeView`; it is not journalled, because after a restart
reality tells it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from controller.core import accounting
from controller.core.changes import (
    CommandClosed,
    CommandOpened,
    IncidentPut,
    JobExplained,
    JobPut,
    NodePut,
    State,
    StateChange,
    growth,
)
from controller.core.effects import Effect, Persist, SendCommand
from controller.core.evidence import with_sign
from controller.core.frozen import replace
from controller.core.incident_record import Evidence, IncidentRecord, TimelineEntry
from controller.core.kinds import Wanted
from controller.core.orders import Command, CommandRecord, StartWorkers
from controller.core.records import NO_ATTEMPT, JobRecord, NodeRecord
from controller.core.settings import Settings
from controller.core.starts import start_on
from controller.core.states import (
    STAYS_CHECKED,
    IncidentState,
    JobState,
    NodeState,
    check_incident,
    check_job,
    check_node,
)
from outlast.ids import Attempt, CommandId, JobId, NodeId


@dataclass(slots=True)
class NodeView:
    """What is seen of a node right now."""

    connected: bool = False
    late: bool = False
    lost: bool = False
    silent: bool = False
    gone: str = ""
    # Whether what the cluster says of a node that is gone speaks against its host.
    blames_host: bool = True
    # Why others want nothing new on the host, "" when they do not mind.
    closed: str = ""
    # Where its host stands, as the cluster says.
    topology: str = ""
    # Of Outlast, as its agent says; "" for one that does not.
    version: str = ""
    late_since_s: float = 0.0


_Record = TypeVar("_Record", JobRecord, NodeRecord, IncidentRecord)


@dataclass(slots=True, kw_only=True)
class Look:
    """What a job that waits for nodes has found when it looked at all of them: see `looks`."""

    num_missing: int
    until_s: float
    key: tuple[object, ...]
    # Nodes of which anything has changed since.
    changed: dict[NodeId, None] = field(default_factory=dict)


@dataclass(slots=True)
class Context:
    """One machine's memory, and the batch that the present call builds."""

    settings: Settings
    state: State = field(default_factory=State)
    node_views: dict[NodeId, NodeView] = field(default_factory=dict)
    # Nodes in use that are late or not connected, and that nobody else reports gone.
    quiet: dict[NodeId, None] = field(default_factory=dict)
    # Nodes that have been silent for long, for whoever does not want to look at all.
    silent: dict[NodeId, None] = field(default_factory=dict)
    now_s: float = 0.0
    reconciling_until_s: float | None = None
    blind_until_s: float | None = None
    # How it stands with nodes that the cluster brings.
    awaited: str = ""
    # Do not call it blindness again before the last suspicion is well over.
    trusting_until_s: float = 0.0
    # Jobs on whose state the machine has failed, and how: nothing is decided about them.
    aside: dict[JobId, str] = field(default_factory=dict)
    # How things stand in the queue, as `queue` has computed it; None once a job or node has come
    # into another state. How often a job has.
    turns: object = None
    num_moves: int = 0
    # Of jobs that wait for nodes.
    looks: dict[JobId, Look] = field(default_factory=dict)
    # Since when the quotas of their owners allow jobs that wait and that had to wait for them. Not
    # journalled: after a restart of the controller one has waited since it queued.
    allowed_s: dict[JobId, float] = field(default_factory=dict)
    # Searches that were asked for since the controller started.
    asked_searches: list[str] = field(default_factory=list)
    # Whether anything has changed that nodes which wait may depend on.
    fleet_touched: bool = True
    changes: list[StateChange] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in self.state.nodes:
            self.saw(node)

    @property
    def is_unsure(self) -> bool:
        """Whether nodes that are not seen may be there all the same."""
        return self.blind_until_s is not None or self.reconciling_until_s is not None

    def take_batch(self) -> list[Effect]:
        """The effects of this call, the journal's first; empties the batch."""
        batch: list[Effect] = []
        if self.changes:
            batch.append(Persist(changes=tuple(self.changes)))
        batch.extend(
            effect
            for effect in self.effects
            # What the same batch gave up again must not happen.
            if not isinstance(effect, SendCommand)
            or effect.command.command_id in self.state.commands
        )
        self.changes.clear()
        self.effects.clear()
        return batch

    def record(self, change: StateChange) -> None:
        if not self.fleet_touched:
            self.fleet_touched = self._touches_fleet(change)
        if self.looks:
            self._note_command(change)
        self.state.apply(change)
        self.changes.append(change)
        if isinstance(change, NodePut):
            self.saw(change.node.node)

    def _note_command(self, change: StateChange) -> None:
        """Whether a node is free also depends on what it was asked for."""
        match change:
            case CommandOpened(command=command):
                self._note_change(command.node)
            case CommandClosed(command_id=command_id) if command_id in self.state.commands:
                self._note_change(self.state.commands[command_id].node)
            case _:
                pass

    def _note_change(self, node: NodeId) -> None:
        for look in self.looks.values():
            look.changed[node] = None

    def _touches_fleet(self, change: StateChange) -> bool:
        match change:
            case CommandOpened(command=command):
                return self.state.index.is_idle(command.node)
            case CommandClosed(command_id=command_id):
                return self.state.index.is_idle(self.state.commands[command_id].node)
            case JobPut() | NodePut():
                return True
            case _:
                return False

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def view(self, node: NodeId) -> NodeView:
        view = self.node_views.get(node)
        if view is None:
            view = self.node_views[node] = NodeView()
        return view

    def saw(self, node: NodeId) -> None:
        """What is seen of a node, or whether it is in use, may have changed."""
        self._note_change(node)
        view = self.view(node)
        is_heard = view.connected and not view.late
        record = self.state.nodes.get(node)
        has_left = record is not None and record.has_left
        if is_heard or has_left or view.gone or node not in self.state.index.in_use:
            self.quiet.pop(node, None)
        else:
            self.quiet[node] = None

    def connected(self, node: NodeId | None) -> bool:
        return node is not None and self.view(node).connected

    # Jobs

    def put(self, record: _Record) -> _Record:
        """Record what has changed of a job, node or incident; nothing happens when nothing has."""
        if isinstance(record, JobRecord):
            job = self.state.jobs.get(record.job_id)
            if record != job:
                self.record(JobPut(job=record, before=job))
        elif isinstance(record, NodeRecord):
            node = self.state.nodes.get(record.node)
            if record != node:
                self.record(NodePut(node=record, before=node))
        else:
            self._put_incident(record)
        return record

    def _put_incident(self, record: IncidentRecord) -> None:
        old = self.state.incidents.get(record.incident)
        if record != old:
            added = None if old is None else growth(old, record)
            self.record(added or IncidentPut(incident=record, before=old))

    def explain(self, job: JobRecord, reason: str) -> None:
        """Record why a job is still where it is; nothing happens when that has not changed."""
        if reason != job.reason:
            self.record(JobExplained(job_id=job.job_id, reason=reason))

    def move_job(
        self, job: JobRecord, to: JobState, reason: str, *, deadline_s: float | None = None
    ) -> JobRecord:
        """Take a job to another state, and note the phase in its open incident."""
        check_job(job.state, to, job.job_id)
        self.turns = None
        self.num_moves += 1
        changed = self.put(
            replace(
                job,
                state=to,
                since_s=self.now_s,
                reason=reason,
                deadline_s=deadline_s,
                account=self._accounted(job, to),
            )
        )
        incident = self.incident_of(changed)
        if incident is not None:
            self.note(incident, str(to).lower(), reason, state=to)
        return changed

    def _accounted(self, job: JobRecord, to: JobState) -> accounting.Account:
        """The job's account once it is in this state."""
        incident = self.incident_of(job)
        is_judged = incident is not None and incident.state is IncidentState.EVIDENCE
        part = accounting.part_of(
            to,
            is_redoing=incident is not None,
            is_for_user=job.wanted is not Wanted.RUN and not is_judged,
            is_growing=job.grow_step is not None and not is_judged,
        )
        return accounting.moved(job.account, part, self.now_s)

    # Nodes

    def move_node(
        self, node: NodeRecord, to: NodeState, reason: str, *, timer_s: float | None = None
    ) -> NodeRecord:
        check_node(node.state, to, node.node)
        self.turns = None
        if (node.state, to) not in STAYS_CHECKED:
            node = replace(node, checked_s=None, checked_storage="")
        return self.put(replace(node, state=to, since_s=self.now_s, reason=reason, timer_s=timer_s))

    # Incidents

    def incident_of(self, job: JobRecord) -> IncidentRecord | None:
        return None if job.incident is None else self.state.incidents[job.incident]

    def move_incident(self, incident: IncidentRecord, to: IncidentState) -> IncidentRecord:
        if incident.state is not to:
            check_incident(incident.state, to, incident.incident)
        return self.put(replace(incident, state=to))

    def note(
        self,
        incident: IncidentRecord,
        phase: str,
        detail: str = "",
        *,
        state: JobState | None = None,
        is_verdict: bool = False,
    ) -> IncidentRecord:
        """Add a line to an incident's timeline."""
        entry = TimelineEntry(
            phase=phase, at_s=self.now_s, detail=detail, state=state, is_verdict=is_verdict
        )
        return self.put(replace(incident, timeline=(*incident.timeline, entry)))

    def add_evidence(self, incident: IncidentRecord, evidence: Evidence) -> IncidentRecord:
        known = with_sign(incident.evidence, evidence)
        if known == incident.evidence:
            return incident
        fault_s = min(incident.fault_s, evidence.at_s)
        return self.put(replace(incident, evidence=known, fault_s=fault_s))

    # Commands

    def open_command(
        self,
        command_id: CommandId,
        node: NodeId,
        command: Command,
        *,
        job: JobId | None = None,
        attempt: Attempt = NO_ATTEMPT,
    ) -> None:
        """Journal an intent and send it; nothing happens when it is open already."""
        if command_id in self.state.commands:
            return
        opened = CommandRecord(
            command_id=command_id,
            node=node,
            job=job,
            attempt=attempt,
            issued_s=self.now_s,
            command=command,
        )
        self.record(CommandOpened(command=opened))
        if self.connected(node):
            self.send(opened)

    def send(self, command: CommandRecord) -> None:
        """Send an open command, now or again."""
        if not isinstance(command.command, StartWorkers):
            self.emit(SendCommand(command=command))
            return
        attempt = None if command.job is None else self.state.attempts.get(command.job)
        if attempt is None or attempt.attempt != command.attempt:
            # The journal of a version that wrote all of it into each order. Without an order
            # its workers count as missing, unless they run.
            self.close_command(command.command_id, "the order of an older version")
        else:
            start = start_on(self.state, attempt, command.node)
            self.emit(SendCommand(command=command, start=start))

    def close_command(self, command_id: CommandId, why: str) -> None:
        if command_id in self.state.commands:
            self.record(CommandClosed(command_id=command_id, why=why))

    def commands_of(
        self,
        kind: type[Command],
        *,
        node: NodeId | None = None,
        job: JobId | None = None,
    ) -> list[CommandRecord]:
        """Open commands of a kind, for a node and/or a job."""
        commands = self.state.commands
        return [
            record
            for record in map(commands.__getitem__, self.state.index.commands(kind, node, job))
            if isinstance(record.command, kind) and (job is None or record.job == job)
        ]

    def open_incidents(self) -> list[IncidentRecord]:
        """Incidents that are not closed, oldest first."""
        return [self.state.incidents[each] for each in self.state.index.open_incidents]

    def waiting_nodes(self) -> list[NodeRecord]:
        """Nodes that time or a check brings on, and free ones that have something."""
        index = self.state.index
        ids = [*index.waiting, *self._ill()]
        return [self.state.nodes[node] for node in ids]

    def _ill(self) -> list[NodeId]:
        """Free nodes that are silent or stuck, by whichever is quicker: either may be thousands."""
        index = self.state.index
        if not self.silent and not index.stuck:
            return []
        if len(self.silent) < len(index.free):
            ill = dict.fromkeys((*self.silent, *index.stuck))
            return sorted((node for node in ill if node in index.free), key=index.order.__getitem__)
        return [node for node in index.free if node in self.silent or node in index.stuck]
