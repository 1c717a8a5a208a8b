"""Memory of a rank by part, before anything runs.

State is exact, up to the padding of buckets; `working` is the largest need of a
moment on top of what is kept. A test holds the sum within 10 % of what the
allocator counts. What the backward pass keeps is in `trainer.core.activations`.

Source: state after ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from outlast.sizing.parameters import PlanInput, Units, layer_kinds, stage_units
from outlast.sizing.slots import host_slot_bytes, saved_bytes
from trainer.core.activations import activation_bytes, block_bytes, loss_bytes, offloaded_bytes
from trainer.core.buffers import receive_buffers
from trainer.core.traffic import message_bytes

# `checkpoint.core.slots`: two rotating ones and one more for the upload in flight.
NUM_HOST_SLOTS = 3
# `trainer.parallel.zero`: one block in use, the next one on its way.
_GATHERED_BLOCKS = 2
# `trainer.parallel.gradients`: two on the wire while a third one is filled.
_REDUCED_BUCKETS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage needs, by part."""

    stage: int
    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    """Messages of the pipeline, and the weights that ZeRO has gathered."""
    working_bytes: int
    """The largest need of a moment: a loss, a block's backward, an optimizer step."""
    host_slots_bytes: int
    host_memory_bytes: int
    """What is enough tmpfs for those slots, with all that is in them besides state."""
    host_slot_bytes: int
    """The same for one slot: where nodes keep copies for each other there are more."""
    host_activations_bytes: int
    """Pinned memory of the host for what blocks keep with `parallel.recompute: offload`."""

    @property
    def device_bytes(self) -> int:
        """All but the host-memory checkpoint slots."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
            + self.working_bytes
        )


def rank_memory(facts: PlanInput, stage: int) -> RankMemory:
    """What each rank of `stage` needs: all of them need the same."""
    units = stage_units(facts, stage)
    weights, gradients, optimizer = _state_bytes(facts, units)
    activations = activation_bytes(facts, stage)
    slot_bytes = host_slot_bytes(facts, stage)
    return RankMemory(
        stage=stage,
        parameters=units.total,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        buffers_bytes=_receive_bytes(facts, stage) + _gathered_bytes(facts, units),
        working_bytes=_working_bytes(facts, stage, units, activations),
        host_slots_bytes=NUM_HOST_SLOTS * saved_bytes(facts, stage),
        host_memory_bytes=NUM_HOST_SLOTS * slot_bytes,
        host_slot_bytes=slot_bytes,
        host_activations_bytes=offloaded_bytes(facts, stage),
    )


def state_bytes(facts: PlanInput, stage: int) -> int:
    """What a rank of `stage` holds through a step at least, whatever passes keep."""
    return sum(_state_bytes(facts, stage_units(facts, stage)))


def _state_bytes(facts: PlanInput, units: Units) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state that live through the step."""
    sizes, level, total = facts.sizes, facts.zero.level, units.total
    share = units.shard(facts.layout)
    # At level 3 the shard is what the optimizer works on: 16-bit weights exist while gathered.
    sharded = 0 if sizes.master else sizes.weight * share
    weights = sharded if level >= 3 else sizes.weight * total
    # Gradients that are reduced once a step must wait for it whole, at any level.
    waits = level < 2 or not facts.zero.reduces_each
    gradients = sizes.gradient * (total if waits else share)
    if level >= 2 and waits:
        gradients += sizes.gradient * share
    optimizer = (sizes.master + 2 * sizes.moment) * (share if level >= 1 else total)
    return weights, gradients, optimizer


def _gathered_bytes(facts: PlanInput, units: Units) -> int:
    """Whole weights at level 3: all of a step, or of two units and what stays beside them."""
    zero = facts.zero
    if zero.level < 3:
        return 0
    block = max(units.blocks) + max(units.divided)
    amid_blocks = _GATHERED_BLOCKS * block + max(units.input_ends, units.output_ends)
    some = min(units.total, max(amid_blocks, block + units.input_ends + units.output_ends))
    return facts.sizes.weight * (some if zero.reshards_each else units.total)


def _reduced_bytes(facts: PlanInput, units: Units) -> int:
    """Whole gradients that exist on their way to the replicas, and what comes from there."""
    replicas = facts.layout.dp
    if facts.zero.level < 2 or not facts.zero.reduces_each:
        return 0
    received = units.largest * (replicas - 1) // replicas
    return facts.sizes.gradient * (min(units.total, _REDUCED_BUCKETS * units.largest) + received)


def _receive_bytes(facts: PlanInput, stage: int) -> int:
    """Receive buffers, of training and of evaluation."""
    count = _receive_buffers(
        facts.schedule,
        facts.layout.pp,
        facts.num_micro_batches,
        facts.virtual_stages,
        facts.extra_warmup,
    )[stage]
    return count * message_bytes(facts)


# One plan asks for every stage, and a search for one schedule again and again.
_receive_buffers = lru_cache(maxsize=1024)(receive_buffers)


def _working_bytes(facts: PlanInput, stage: int, units: Units, activations: int) -> int:
    """The largest need of a moment, on top of everything that is kept."""
    parts = facts.parts(stage)
    reduced = _reduced_bytes(facts, units)
    needs = [
        # A block that is computed again keeps for a moment what it did not keep before.
        _block_backward_bytes(facts, layer)
        + reduced
        + block_bytes(facts, layer, "none")
        - block_bytes(facts, layer)
        + (_coming_bytes(facts) if layer in facts.offloaded else 0)
        for layer in layer_kinds(facts, parts)
    ]
    if any(part.is_last for part in parts):
        needs.append(loss_bytes(facts))
    # All activations are gone when the optimizer comes. It goes by buckets, but LAMB knows
    # how far a tensor moves only once it has every bucket's direction.
    directions = _directions(facts, units)
    needs.append(directions * facts.sizes.moment - activations)
    return max(needs)


def _coming_bytes(facts: PlanInput) -> int:
    """`trainer.model.offload`: what the next block keeps comes while this one is computed."""
    return facts.stream_values * facts.sizes.weight


def _directions(facts: PlanInput, units: Units) -> int:
    """Numbers of which the optimizer knows at once how they move."""
    if facts.optimizer == "lamb":
        return units.shard(facts.layout) if facts.zero.level else units.total
    if not facts.zero.level:
        return units.largest
    divided, dp = max(units.divided), facts.layout.dp
    common = max(*units.blocks, units.input_ends, units.output_ends)
    return max(common // dp, divided * facts.layout.ep // dp)


def _block_backward_bytes(facts: PlanInput, layer: int) -> int:
    """Gradients of a linear layer, while those before it are already free."""
    shape, tp = facts.model.shape, facts.layout.tp
    experts = shape.experts_of(layer)
    if experts is not None:
        # All experts' matrices at once, and each slot's share of their inputs and outputs.
        width = (2 if shape.gated else 1) * experts.hidden // tp
        slots = facts.tokens * experts.per_token
        own = experts.number // facts.layout.ep
        values = slots * (width + shape.hidden) + own * width * shape.hidden
        return values * facts.sizes.weight
    widest = max(shape.mlp_in_width, shape.qkv_width)
    if facts.model.parallel_block:
        widest = shape.mlp_in_width + shape.qkv_width
    weight = shape.hidden * widest // tp
    values = facts.tokens * (widest // tp + shape.hidden) + weight
    return values * facts.sizes.weight
