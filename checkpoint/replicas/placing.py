"""Where the copies of a job's host memory go, read from its spec. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from checkpoint.core.placement import Placement, place_replicas
from checkpoint.core.slots import NUM_HELD_SLOTS, NUM_SLOTS, NUM_SLOTS_WITH_REPLICAS
from outlast.spec import JobSpec


def placement_of(
    spec: JobSpec, rank_nodes: Sequence[str] = (), *, shift: int = 0
) -> Placement | None:
    """Where else each rank's state is; None where the spec wants no copies.

    `rank_nodes` names the node of each rank; unless given, nodes are called by their index.
    `shift` is the attempt's, as its order to start says it.
    """
    if spec.checkpoint.replicas == 0:
        return None
    layout = spec.layout
    per_node = spec.workers_per_node
    nodes = rank_nodes or [
        name for name in map(str, range(spec.num_nodes)) for _ in range(per_node)
    ]
    # Of a script's ranks nobody knows which have the same.
    parallel = spec.parallel
    dp_is_sharded = spec.is_script or parallel.zero.level > 0 or parallel.ep > 1
    return place_replicas(layout, nodes, dp_is_sharded=dp_is_sharded, shift=shift)


def partner_node_indexes(
    placement: Placement, workers_per_node: int
) -> tuple[tuple[int, ...], ...]:
    """By index of a node, those of the nodes that have the state of its ranks, too.

    `placement` is of nodes that are called by their index.
    """
    return tuple(
        tuple(int(node) for node in placement.partners(range(first, first + workers_per_node)))
        for first in range(0, placement.layout.world_size, workers_per_node)
    )


def num_own_slots(placement: Placement | None) -> int:
    """Host-memory slots of each rank."""
    is_copying = placement is not None and placement.is_copying
    return NUM_SLOTS_WITH_REPLICAS if is_copying else NUM_SLOTS


def slots_by_stage(spec: JobSpec, placement: Placement | None) -> list[Counter[int]]:
    """By index of a node: of how many slots of ranks of which stage it needs room for.

    `placement` is that of the spec, with nodes called by their index.
    """
    own, per_node, layout = num_own_slots(placement), spec.workers_per_node, spec.layout
    stage_of = [stage for stage in range(spec.parallel.pp) for _ in range(layout.tp * layout.dp)]
    nodes = [
        Counter(stage_of[first : first + per_node] * own)
        for first in range(0, spec.layout.world_size, per_node)
    ]
    if placement is not None:
        for stage, holder in zip(stage_of, placement.holders, strict=True):
            if holder is not None:
                nodes[int(holder)][stage] += NUM_HELD_SLOTS
    return nodes
