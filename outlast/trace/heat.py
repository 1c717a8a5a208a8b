"""What a heat map shows of the steps of ranks, and how."""

from __future__ import annotations

from enum import StrEnum


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


def node_stride(num_ranks: int, most_ranks: int) -> int:
    """Of how many nodes one is asked for a map of about `most_ranks` ranks; 0: of all of them."""
    return max(1, -(-num_ranks // most_ranks)) if most_ranks else 1
