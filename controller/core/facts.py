"""Facts: the journal's vocabulary, and the state that they fold into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from controller.core.index import Index
from controller.core.records import (
    AttemptRecord,
    CommandRecord,
    IncidentRecord,
    JobRecord,
    NodeRecord,
)
from outlast.ids import CommandId, IncidentId, JobId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPut:
    """This is the job now."""

    job: JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePut:
    """This is the node now."""

    node: NodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentPut:
    """This is the incident now."""

    incident: IncidentRecord


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


Fact = JobPut | NodePut | IncidentPut | AttemptPut | CommandOpened | CommandClosed


@dataclass(slots=True)
class State:
    """Everything decided so far. Dicts keep insertion order; nothing iterates a set."""

    jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    nodes: dict[NodeId, NodeRecord] = field(default_factory=dict)
    incidents: dict[IncidentId, IncidentRecord] = field(default_factory=dict)
    # The newest one of each job.
    attempts: dict[JobId, AttemptRecord] = field(default_factory=dict)
    commands: dict[CommandId, CommandRecord] = field(default_factory=dict)
    index: Index = field(default_factory=Index, compare=False, repr=False)

    def apply(self, fact: Fact) -> None:
        """Take one fact in. The only way in which a state changes."""
        match fact:
            case JobPut(job=job):
                self.jobs[job.job_id] = job
            case NodePut(node=node):
                self.index.put_node(self.nodes.get(node.node), node)
                self.nodes[node.node] = node
            case IncidentPut(incident=incident):
                self.incidents[incident.incident] = incident
                self.index.put_incident(incident)
            case AttemptPut(attempt=attempt):
                self.attempts[attempt.job] = attempt
            case CommandOpened(command=command):
                self.commands[command.command_id] = command
                self.index.open_command(command)
            case CommandClosed(command_id=command_id):
                closed = self.commands.pop(command_id, None)
                if closed is not None:
                    self.index.close_command(closed)
            case _:
                assert_never(fact)

    def as_facts(self) -> list[Fact]:
        """Facts that rebuild this state from nothing: a snapshot."""
        return [
            *(JobPut(job=job) for job in self.jobs.values()),
            *(NodePut(node=node) for node in self.nodes.values()),
            *(IncidentPut(incident=incident) for incident in self.incidents.values()),
            *(AttemptPut(attempt=attempt) for attempt in self.attempts.values()),
            *(CommandOpened(command=command) for command in self.commands.values()),
        ]


def fold(facts: Iterable[Fact]) -> State:
    """The state that a journal describes."""
    state = State()
    for fact in facts:
        state.apply(fact)
    return state
