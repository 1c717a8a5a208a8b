"""Whether a node's host memory can hold the checkpoints of its ranks, before they do anything.

A rank takes its slots after it has joined its groups and restored its state. That there is
no room for them should not take so long to find out, nor be found out by the rank that
happens to come last.
"""

from __future__ import annotations

from pathlib import Path

from checkpoint.memory import most_host_memory_bytes
from checkpoint.slotfile import free_bytes
from outlast.errors import MisfitError, OccupiedError
from trainer.planning import host_memory_bytes
from trainer.worker.assignment import Assignment


def check_memory(assignment: Assignment) -> None:
    """Raise MisfitError where the ranks of this node need more host memory than it can hold, and
    OccupiedError where something else uses it now.

    What an earlier attempt of the job has taken counts as free: its slots are used again, or
    give way to others.
    """
    ranks = assignment.node_ranks
    needed = host_memory_bytes(assignment.spec, ranks)
    job_dir = assignment.memory_dir.parent
    job_dir.mkdir(parents=True, exist_ok=True)
    room = free_bytes(job_dir) + _taken_bytes(job_dir)
    total = most_host_memory_bytes(job_dir)
    what = f"host memory {job_dir}: checkpoints of {len(ranks)} ranks need up to {needed} bytes"
    if needed > total:
        raise MisfitError(
            f"{what} and it holds {total} in all; enlarge this tmpfs or give the node fewer ranks"
        )
    if needed > room:
        raise OccupiedError(
            f"{what} and there is room for {room} of {total}; something else uses the rest, maybe "
            "another node on this machine: free it, enlarge this tmpfs or give the node fewer ranks"
        )


def _taken_bytes(job_dir: Path) -> int:
    total = 0
    for path in job_dir.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            # The agent cleans up beside us.
            continue
    return total
