"""What a heat map shows of the steps of ranks, and how."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import lru_cache
from itertools import chain

from outlast.layout import Layout

# The median of two nodes of which one is slow may be the slow one's.
LEAST_PEER_NODES = 3


class Measure(StrEnum):
    """What of a step is shown."""

    STEP = "step"
    WORK = "work"
    """In no operation that may wait for other ranks: what a slow rank has more of."""
    WAITING = "waiting"
    """In such operations, their own transfers among it: what its peers have more of."""
    FORWARD = "forward"
    """In forward passes, without waiting for others; the rest likewise."""
    BACKWARD = "backward"
    DATA = "data"
    """Until the step's batch was there."""
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    """Behind the step, until it was saved in host memory or its copy was under way."""
    GARBAGE_COLLECTION = "garbage_collection"
    """Behind the step."""


class Order(StrEnum):
    """Of the rows of a heat map."""

    RANK = "rank"
    NODE = "node"
    POSITION = "position"
    """By replica, then stage, then tensor shard: who works on the same batch is side by side."""


class Alike(StrEnum):
    """What equal peers have in common in a heat map, besides the job."""

    STAGE = "stage"
    EXPERTS = "experts"
    """They hold the same experts."""


def has_experts(layout: Layout) -> bool:
    """Whether ranks differ by their experts; who alone has some has no equal peer but by stage."""
    return layout.ep > 1 and layout.dp // layout.ep * layout.tp > 1


def kind_of(rank: int, layout: Layout) -> tuple[int, int] | None:
    """What ranks of equal work have in common; None for a rank that is not of the layout."""
    if rank >= layout.world_size:
        return None
    replica = rank // layout.tp % layout.dp
    stage = rank // (layout.tp * layout.dp)
    return stage, replica % layout.ep if has_experts(layout) else 0


# 0.16 s for 131,072 ranks, in the controller's loop.
@lru_cache(maxsize=64)
def node_stride(layout: Layout, workers_per_node: int, most_ranks: int) -> int:
    """Of how many nodes one is asked for a map of about `most_ranks` ranks; 0: of all of them.

    Of more nodes where a rank would have peers on fewer than `LEAST_PEER_NODES` of them, though
    it has more: a slow node that is measured against itself looks like any other.
    """
    num_ranks = layout.world_size
    if not 0 < most_ranks < num_ranks:
        return 1
    ranks = range(num_ranks)
    nodes = [
        {kind_of(rank, layout) for rank in ranks[first : first + workers_per_node]}
        for first in ranks[::workers_per_node]
    ]
    least = {
        kind: min(LEAST_PEER_NODES, number)
        for kind, number in Counter(chain.from_iterable(nodes)).items()
    }
    for stride in range(-(-num_ranks // most_ranks), 1, -1):
        asked = Counter(chain.from_iterable(nodes[::stride]))
        if all(number >= least[kind] for kind, number in asked.items()):
            return stride
    return 1
