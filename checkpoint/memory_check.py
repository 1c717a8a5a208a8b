"""Whether a node's host memory can hold the checkpoints of its ranks, before they do anything.

The agent asks before it starts a process, and a rank that has no slots yet once more before it
joins its groups: it takes them only after it has restored its state. That there is no room for them
should not take so long to find out, nor be found out by the rank that happens to come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from checkpoint.memory import free_bytes, held_bytes, most_host_memory_bytes
from checkpoint.sizing import host_memory_bytes
from outlast.errors import MisfitError, OccupiedError
from outlast.sizing.describe import in_words, told_apart
from outlast.spec import JobSpec


def check_host_memory(
    spec: JobSpec, ranks: Sequence[int], job_dir: Path, *, shift: int = 0
) -> None:
    """Raise MisfitError where these ranks, which share a node, need more host memory than it can
    hold, and OccupiedError where something else uses it now.

    `job_dir` is the job's folder in that of the agent, and need not be there yet. What an earlier
    attempt has taken counts as free: its slots are used again, or give way to others. `shift` is
    that of copies, as in `placement_of`.
    """
    folder = job_dir.parent
    folder.mkdir(parents=True, exist_ok=True)
    needed = host_memory_bytes(spec, ranks, shift=shift)
    total = most_host_memory_bytes(folder)
    what = f"checkpoints of {len(ranks)} ranks in {folder} need"
    if needed > total:
        need, has = told_apart(needed, total)
        raise MisfitError(
            f"host memory: {what} {need} and it holds {has} in all; enlarge this tmpfs (and the "
            "memory behind it), or split the model over more nodes (parallel.tp, parallel.pp, "
            "parallel.zero.level)"
        )
    free = free_bytes(folder) + held_bytes([job_dir])
    if needed > free:
        need, has, of = told_apart(needed, free, total)
        others = ", ".join(_other_jobs(folder, job_dir.name))
        raise OccupiedError(
            f"host memory: {what} {need} and {has} of {of} are free; the rest is used by "
            f"{others or 'something else, maybe another node on this machine'}"
        )


def _other_jobs(folder: Path, job: str) -> list[str]:
    """Jobs with the most host memory here besides this one, with how much that is."""
    held = {each.name: held_bytes([each]) for each in folder.iterdir() if each.name != job}
    most = sorted(held.items(), key=lambda item: -item[1])[:3]
    return [f"{name} ({in_words(nbytes)})" for name, nbytes in most if nbytes]
