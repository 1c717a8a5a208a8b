"""Who may say what: a report of a job counts only from a node that has a part in it.

Pure functions of the state. They compare with what was decided, so a report that overtakes
a decision does not exist: orders are durable before any agent can act on them.
"""

from __future__ import annotations

from controller.core.changes import State
from controller.core.edge.rules import Reason
from controller.core.records import JobRecord
from outlast.ids import Attempt, JobId, NodeId

# Orders to stop what an agent runs and nobody here knows: enough for what a lost journal
# leaves behind on a node.
MAX_UNKNOWN_WORKERS = 64


def refusal(
    state: State, node: NodeId, job_id: JobId, attempt: int, rank: int | None = None
) -> Reason | None:
    """Why `node` may not report on this attempt of a job, or on this rank of it.

    A node that took part in an earlier attempt may still tell how that ended.
    """
    job = state.jobs.get(job_id)
    if job is None:
        return Reason.UNKNOWN_JOB
    if not 1 <= attempt <= job.attempt:
        return Reason.UNKNOWN_ATTEMPT
    record = state.attempts.get(job_id)
    if record is not None and record.attempt == attempt:
        nodes = record.nodes
        if rank is not None:
            # None, where the journal of an older version has an attempt without ranks.
            node_index = rank // max(1, record.workers_per_node)
            is_its = 0 <= node_index < len(nodes) and nodes[node_index] == node
            return None if is_its else Reason.NOT_PLACED
        # Every report of each of thousands of nodes is asked about.
        is_placed = state.index.is_placed(record, node) or node in job.held_by
        return None if is_placed else Reason.NOT_PLACED
    if rank is not None and attempt == job.attempt and not _holds_rank(job, node, rank):
        return Reason.NOT_PLACED
    return None if node in job.held_by or node in job.nodes else Reason.NOT_PLACED


def _holds_rank(job: JobRecord, node: NodeId, rank: int) -> bool:
    """By the nodes of the job: the journal of an older version has no record of attempts."""
    node_index = rank // job.plan.workers_per_node
    return 0 <= node_index < len(job.nodes) and job.nodes[node_index] == node


def is_present(state: State, job_id: JobId, attempt: int) -> bool:
    """Whether this is the newest attempt: older ones have no heartbeats of interest."""
    job = state.jobs.get(job_id)
    return job is not None and job.attempt == Attempt(attempt)


def is_within(state: State, job_id: JobId, *steps: int) -> bool:
    """Whether a job that exists has such steps."""
    total_steps = state.jobs[job_id].plan.total_steps
    # Where a script ends is not known.
    return total_steps is None or max(steps) <= total_steps


def may_stop_unknown(state: State, node: NodeId) -> bool:
    """Whether an agent's word of workers that nobody knows may open one more order."""
    return len(state.index.of_node.get(node, ())) < MAX_UNKNOWN_WORKERS
