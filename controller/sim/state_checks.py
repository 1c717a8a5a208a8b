"""What can be seen of a state alone: whether its records fit together, and what is overdue."""

from __future__ import annotations

import math
from collections.abc import Iterator

from controller.core.changes import State
from controller.core.orders import CommandRecord, ForgetJob, PushCheckpoint, RunSuite, StopWorkers
from controller.core.records import NodeRecord
from controller.core.states import (
    AT_WORK,
    AWAY,
    LIVE,
    PLACED,
    IncidentState,
    JobState,
    NodeState,
)
from outlast.ids import JobId, NodeId

# Nothing new is asked of a node in these, but only what is about what it has.
_UNUSED = (NodeState.QUARANTINED, *AWAY)
_OF_THE_PAST = StopWorkers | ForgetJob | PushCheckpoint

# Between an order's limit and our look.
SLACK_S = 1.0


def is_same(decided: State, journalled: State) -> bool:
    """Whether the states are equal; the records of both are the same objects from then on.

    Records never change. So the next comparison sees at once that they are the same, and looks
    into those only that have been replaced since.
    """
    if decided != journalled:
        return False
    # The keys are there already, so their order stays. `done` holds what does change.
    journalled.jobs.update(decided.jobs)
    journalled.nodes.update(decided.nodes)
    journalled.incidents.update(decided.incidents)
    journalled.attempts.update(decided.attempts)
    journalled.commands.update(decided.commands)
    return True


def inconsistencies(state: State) -> Iterator[tuple[int, str]]:
    """The invariant and what is wrong, wherever jobs, nodes and incidents do not fit together."""
    holders: dict[NodeId, JobId] = {}
    for job in state.jobs.values():
        if len(job.nodes) != job.plan.nodes:
            yield 10, f"{job.job_id} has {len(job.nodes)} places for {job.plan.nodes}"
        for node_id in job.nodes:
            if node_id is None or state.nodes[node_id].job != job.job_id:
                if job.state in AT_WORK:
                    yield 10, f"{job.job_id} is {job.state} without its node {node_id}"
                continue
            if node_id in holders:
                yield 1, f"{node_id} has two places"
            holders[node_id] = job.job_id
        incident = None if job.incident is None else state.incidents[job.incident]
        if incident is not None and incident.state is IncidentState.CLOSED:
            yield 10, f"{job.job_id} names the closed {incident.incident}"
        if job.needs_person and job.state is not JobState.PAUSED:
            yield 10, f"{job.job_id} is {job.state} and waits for a person"
        if job.state in LIVE and job.attempt == 0:
            yield 1, f"{job.job_id} is {job.state} without an attempt"
    for node in state.nodes.values():
        if (node.state in PLACED) != (node.job is not None):
            yield 10, f"{node.node} is {node.state} and belongs to {node.job}"
        if node.job is not None and holders.get(node.node) != node.job:
            yield 10, f"{node.node} belongs to {node.job}, which has no place for it"
        if node.state in _UNUSED:
            for command_id in state.index.of_node.get(node.node, ()):
                if not isinstance(state.commands[command_id].command, _OF_THE_PAST):
                    yield 10, f"{node.node} is {node.state}, and {command_id} is open"


def due_s(command: CommandRecord, state: State) -> float:
    """When it speaks against a node that it has not answered; never for most commands."""
    job = None if command.job is None else state.jobs.get(command.job)
    if job is None or not isinstance(command.command, StopWorkers | RunSuite):
        return math.inf
    limit_s = job.plan.stop_timeout_s
    if isinstance(command.command, RunSuite):
        is_preflight = command.command.suite == "preflight"
        limit_s = job.plan.preflight_timeout_s if is_preflight else job.plan.diagnose_timeout_s
    return command.issued_s + limit_s - SLACK_S


def peers_failed(before: State, node: NodeRecord) -> bool:
    """Whether ranks elsewhere failed by themselves in an incident that names the node."""
    for incident in before.incidents.values():
        named = any(item.node == node.node for item in incident.evidence)
        others = any(
            item.kind == "worker_exit" and item.node != node.node for item in incident.evidence
        )
        if named and others:
            return True
    return False
