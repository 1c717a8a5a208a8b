"""How much host memory a job's checkpoints need at least, from its spec alone and without torch.

What they need exactly depends on every tensor of the model; the trainer computes that.
"""

from __future__ import annotations

from collections.abc import Sequence

from checkpoint.core.slots import NUM_HELD_SLOTS
from checkpoint.placing import num_own_slots, placement_of
from outlast.spec import JobSpec

# What a slot holds: weights and the two moments of AdamW.
_COPIES = 3


def least_slot_bytes(spec: JobSpec) -> int:
    """Host memory that one slot of a rank needs at least: its share of the blocks' matrices only.

    Embeddings lie on some stages only, so they are not counted. From ZeRO 1 on, the weights
    that the optimizer works on and its moments are split over dp.
    """
    model, parallel = spec.model, spec.parallel
    attention = 2 * model.hidden**2 * (1 + model.num_kv_heads / model.heads)
    weights = model.layers * (attention + 2 * model.hidden * model.mlp_hidden)
    item_bytes = 8 if spec.precision == "fp64" else 4
    num_shares = parallel.tp * parallel.pp * (parallel.dp if parallel.zero.level else 1)
    return int(weights * item_bytes * _COPIES / num_shares)


def num_node_slots(spec: JobSpec, ranks: Sequence[int]) -> int:
    """Slots on the node of these ranks: their own, and those of copies that it keeps."""
    placement = placement_of(spec)
    own = len(ranks) * num_own_slots(placement)
    if placement is None or not ranks:
        return own
    place = str(ranks[0] // spec.workers_per_node)
    return own + len(placement.held_on(place)) * NUM_HELD_SLOTS


def least_node_bytes(spec: JobSpec, ranks: Sequence[int]) -> int:
    """Host memory that the node of these ranks needs at least."""
    return num_node_slots(spec, ranks) * least_slot_bytes(spec)
