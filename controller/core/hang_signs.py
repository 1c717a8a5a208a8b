"""Which nodes a hang is held against."""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.events import JobStalled
from controller.core.evidence import NO_FIRST_STEP_YET, NO_STEP_IN_TIME
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind
from controller.core.naming import names
from controller.core.records import JobRecord
from outlast.failures import FailureClass
from outlast.ids import NodeId

# A hang that more nodes than these are part of, as where all ranks entered an operation that does
# not end, says nothing against any one of them, and is one sign.
MAX_BLAMED = 64
# Nodes with links in trouble that a sign tells of.
MAX_TOLD = 4
# Limits of the spec that may be too short for the job itself.
_LIMITS = {
    "recovery.first_step_timeout_s": NO_FIRST_STEP_YET,
    "recovery.hang_timeout_s": NO_STEP_IN_TIME,
}


def signs_of(
    job: JobRecord, event: JobStalled, now_s: float, links: Mapping[NodeId, str]
) -> list[Evidence]:
    """A sign for each node that the hang is blamed on; one for all of them where they are many.

    `links` says of nodes what is wrong with their links. Where ranks are alike that is what tells a
    node from the others.
    """
    said = f"stood still for {event.stalled_s:.1f} s ({event.limit}); {event.detail}"
    first_ranks = _first_ranks(job, event, links)
    if not first_ranks:
        # Nobody is blamed for them alone: stacks, which are taken yet, say more.
        told = "".join(_of(links, node) for node in [*links][:MAX_TOLD])
        return [_sign(event, now_s, said + told, None, None)]
    if len(first_ranks) <= MAX_BLAMED:
        return [
            _sign(event, now_s, f"{said}{_of(links, node)}", node, rank)
            for node_index, rank in first_ranks.items()
            for node in [job.nodes[node_index]]
        ]
    nodes = [node for node_index in first_ranks if (node := job.nodes[node_index]) is not None]
    said = f"{said}; that is {len(first_ranks):,} nodes: {names(nodes)}"
    if not event.is_program_error:
        return [_sign(event, now_s, said, None, None, len(first_ranks))]
    # Nobody is blamed for what the program does; the first rank is where it was seen.
    node_index, rank = next(iter(first_ranks.items()))
    return [_sign(event, now_s, said, job.nodes[node_index], rank, len(first_ranks))]


def _first_ranks(job: JobRecord, event: JobStalled, links: Mapping[NodeId, str]) -> dict[int, int]:
    """Of each node that is blamed, by its place in the job, the first rank."""
    found: dict[int, int] = {}
    for rank in event.culprit_ranks:
        found.setdefault(rank // job.plan.workers_per_node, rank)
    if event.are_alike:
        in_trouble = {place: rank for place, rank in found.items() if job.nodes[place] in links}
        return in_trouble or found
    return found


def _of(links: Mapping[NodeId, str], node: NodeId | None) -> str:
    return f"; on {node}: {links[node]}" if node is not None and node in links else ""


def _sign(
    event: JobStalled,
    now_s: float,
    said: str,
    node: NodeId | None,
    rank: int | None,
    num_nodes: int = 1,
) -> Evidence:
    fingerprint = _LIMITS.get(event.limit.partition(" ")[0], "")
    return Evidence(
        kind=EvidenceKind.STALLED,
        node=node,
        rank=rank,
        detail=said,
        at_s=now_s - event.stalled_s,
        fault_class=FailureClass.USER_ERROR if event.is_program_error else FailureClass.NONE,
        fingerprint="hang of the program" if event.is_program_error else fingerprint,
        num_nodes=num_nodes,
    )
