"""What one commit of the journal writes: the net change of a batch of facts.

A fault moves a job through several states within one batch, thousands of ranks end in one, and
the same order goes to every node. None of what lies between is ever seen: a batch is durable
as a whole or not at all. So of several records of one thing the last is written, signs that were
added to an incident are joined to it, and what is the same for many ranks or nodes is written once.

What does not belong here: facts that must be seen one by one (the log, the watch); they take the
batch as it was decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar, assert_never

from controller.core.facts import (
    AttemptPut,
    CheckpointStored,
    CheckpointWaited,
    CommandClosed,
    CommandOpened,
    CommandsOpened,
    Fact,
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
    grown,
)
from controller.core.orders import CommandRecord
from outlast.ids import IncidentId, JobId, NodeId

_Id = TypeVar("_Id", JobId, NodeId, IncidentId)


def compacted(facts: Iterable[Fact]) -> list[Fact]:
    """Fewer facts that fold into the same state, tables in the same order."""
    batch = _Batch()
    for fact in facts:
        batch.take(fact)
    return batch.facts


@dataclass(slots=True)
class _Batch:
    """The facts so far, and where those are that a later one may change."""

    facts: list[Fact] = field(default_factory=list)
    # Places in `facts`. A fact that depends on one of these makes it final.
    jobs: dict[JobId, int] = field(default_factory=dict)
    nodes: dict[NodeId, int] = field(default_factory=dict)
    incidents: dict[IncidentId, int] = field(default_factory=dict)
    reasons: dict[JobId, int] = field(default_factory=dict)
    done: dict[JobId, int] = field(default_factory=dict)
    # Of the newest command, if nothing has happened to commands since.
    command: int | None = None

    def take(self, fact: Fact) -> None:
        match fact:
            case JobPut():
                self._put_job(fact)
            case NodePut(node=node):
                self._put(self.nodes, node.node, fact)
            case IncidentPut(incident=incident):
                self._put(self.incidents, incident.incident, fact)
            case IncidentGrown():
                self._grow(fact)
            case JobExplained():
                self._explain(fact)
            case RanksDone(job_id=job_id):
                self.jobs.pop(job_id, None)
                self._add_ranks(fact)
            case CommandOpened(command=command):
                self._open(fact, command)
            case CommandClosed() | CommandsOpened():
                self.command = None
                self.facts.append(fact)
            case NodeForgotten(node=node_id):
                self.nodes.pop(node_id, None)
                self.facts.append(fact)
            case (
                NodeChecked(job_id=job_id)
                | JobForgotten(job_id=job_id)
                | CheckpointStored(job_id=job_id)
                | CheckpointWaited(job_id=job_id)
            ):
                self.jobs.pop(job_id, None)
                self.facts.append(fact)
            case JobPruned(job_id=job_id, incidents=pruned):
                self._prune(job_id, pruned)
                self.facts.append(fact)
            case IncidentsPruned(incidents=pruned):
                self._prune(None, pruned)
                self.facts.append(fact)
            case AttemptPut():
                self.facts.append(fact)
            case _:
                assert_never(fact)

    def _put(self, places: dict[_Id, int], key: _Id, fact: Fact) -> None:
        """The record of something: the last one takes the place of the first."""
        place = places.get(key)
        if place is None:
            places[key] = len(self.facts)
            self.facts.append(fact)
        else:
            self.facts[place] = fact

    def _prune(self, job_id: JobId | None, incidents: tuple[IncidentId, ...]) -> None:
        for incident in incidents:
            self.incidents.pop(incident, None)
        if job_id is not None:
            for table in (self.jobs, self.reasons, self.done):
                table.pop(job_id, None)

    def _put_job(self, fact: JobPut) -> None:
        job = fact.job
        place = self.jobs.get(job.job_id)
        before = None if place is None else self.facts[place]
        if isinstance(before, JobPut) and before.job.attempt != job.attempt:
            # With an attempt ends what its ranks have done.
            del self.jobs[job.job_id]
        self._put(self.jobs, job.job_id, fact)
        self.reasons.pop(job.job_id, None)
        self.done.pop(job.job_id, None)

    def _grow(self, fact: IncidentGrown) -> None:
        place = self.incidents.get(fact.incident)
        before = None if place is None else self.facts[place]
        joined: Fact = fact
        if isinstance(before, IncidentPut):
            joined = IncidentPut(incident=grown(before.incident, fact))
        elif isinstance(before, IncidentGrown):
            joined = replace(
                fact,
                evidence=before.evidence + fact.evidence,
                timeline=before.timeline + fact.timeline,
                findings=before.findings + fact.findings,
            )
        self._put(self.incidents, fact.incident, joined)

    def _explain(self, fact: JobExplained) -> None:
        place = self.jobs.get(fact.job_id)
        before = None if place is None else self.facts[place]
        if isinstance(before, JobPut) and place is not None:
            self.facts[place] = JobPut(job=replace(before.job, reason=fact.reason))
        else:
            self._put(self.reasons, fact.job_id, fact)

    def _add_ranks(self, fact: RanksDone) -> None:
        place = self.done.get(fact.job_id)
        before = None if place is None else self.facts[place]
        if isinstance(before, RanksDone):
            fact = replace(fact, ranks=before.ranks + fact.ranks)
        self._put(self.done, fact.job_id, fact)

    def _open(self, fact: CommandOpened, command: CommandRecord) -> None:
        """An order that differs from the one before in its node only is written with that."""
        before = None if self.command is None else self.facts[self.command]
        orders = _as_orders(before)
        this = _as_orders(fact)
        if orders is None or this is None or replace(this, nodes=orders.nodes) != orders:
            self.command = len(self.facts)
            self.facts.append(fact)
        elif self.command is not None:
            self.facts[self.command] = replace(orders, nodes=orders.nodes + this.nodes)


def _as_orders(fact: Fact | None) -> CommandsOpened | None:
    """A command as one for many nodes; None for any other fact, and where its id has no node."""
    if isinstance(fact, CommandsOpened):
        return fact
    if not isinstance(fact, CommandOpened):
        return None
    command = fact.command
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
