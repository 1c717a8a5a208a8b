"""Where the copies of a job's host memory go, read from its spec. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from checkpoint.core.placement import Placement, place_replicas
from checkpoint.core.slots import NUM_HELD_SLOTS, NUM_SLOTS, NUM_SLOTS_WITH_REPLICAS
from outlast.spec import JobSpec


def placement_of(spec: JobSpec, rank_nodes: Sequence[str] = ()) -> Placement | None:
    """Where else each rank's state is; None where the spec wants no copies.

    `rank_nodes` names the node of each rank; unless given, nodes are called by their place.
    """
    if spec.checkpoint.replicas == 0:
        return None
    layout = spec.layout
    per_node = spec.workers_per_node
    nodes = rank_nodes or [str(rank // per_node) for rank in range(layout.world_size)]
    return place_replicas(layout, nodes, dp_is_sharded=spec.parallel.zero.level > 0)


def num_own_slots(placement: Placement | None) -> int:
    """Host-memory slots of each rank."""
    is_copying = placement is not None and placement.is_copying
    return NUM_SLOTS_WITH_REPLICAS if is_copying else NUM_SLOTS


def slots_on_nodes(spec: JobSpec) -> list[dict[int, int]]:
    """By place of a node: of how many slots of which rank it needs room for."""
    placement = placement_of(spec)
    own, per_node = num_own_slots(placement), spec.workers_per_node
    places = [
        dict.fromkeys(range(place * per_node, (place + 1) * per_node), own)
        for place in range(spec.num_nodes)
    ]
    if placement is not None:
        for rank, holder in enumerate(placement.holders):
            if holder is not None:
                places[int(holder)][rank] = NUM_HELD_SLOTS
    return places
