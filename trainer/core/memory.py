"""Memory of a rank by part, before anything runs.

All figures of what the trainer keeps stand here, each beside the code that keeps
it. State is exact. Activations are what the backward pass needs, tensor by
tensor; `working` is the largest need of a moment on top of that. A test holds the
sum within 10 % of what the allocator counts.

Sources: activations after Korthikanti et al. (arXiv 2205.05198), whose 34 s b h
per layer becomes less without dropout masks and with attention that keeps no
scores; state after ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.core.sizes import PlanInput, Units, layers_of, stage_units
from trainer.core.timing import peak_in_flight

# The stager keeps two rotating slots and one more for the upload in flight.
NUM_HOST_SLOTS = 3
# A bucket in use and the next one, which is gathered or reduced meanwhile.
_LIVE_BUCKETS = 2
# Norm statistics and attention's sums of exponentials are at least fp32.
_STATISTIC_BYTES = 4
_INDEX_BYTES = 8


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
    """Messages of the pipeline, and what ZeRO gathers and reduces at a time."""
    working_bytes: int
    """The largest need of a moment: a loss, a block's backward, an optimizer step."""
    host_slots_bytes: int

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
    weights, gradients, optimizer = _state_values(facts, units)
    activations = _activation_bytes(facts, stage)
    return RankMemory(
        stage=stage,
        parameters=units.total,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        buffers_bytes=_message_bytes(facts, stage) + _bucket_bytes(facts, units),
        working_bytes=_working_bytes(facts, stage, units, activations),
        host_slots_bytes=NUM_HOST_SLOTS * _saved_bytes(facts, units),
    )


# State


def _state_values(facts: PlanInput, units: Units) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state that live through the step."""
    sizes, level, total = facts.sizes, facts.zero.level, units.total
    share = -(-total // facts.layout.dp)
    weights = sizes.weight * (share if level >= 3 else total)
    # Gradients that are reduced once a step must wait for it whole, at any level.
    waits = level < 2 or not facts.zero.reduces_each
    gradients = sizes.gradient * (total if waits else share)
    if level >= 2 and waits and facts.layout.dp > 1:
        gradients += sizes.gradient * share
    optimizer = (sizes.master + 2 * sizes.moment) * (share if level >= 1 else total)
    return weights, gradients, optimizer


def _bucket_bytes(facts: PlanInput, units: Units) -> int:
    """Whole weights and gradients that exist for as long as a bucket needs them."""
    zero, sizes = facts.zero, facts.sizes
    if facts.layout.dp == 1:
        return 0
    bucket = min(units.total, _LIVE_BUCKETS * units.largest)
    found = 0
    if zero.level >= 3:
        found += sizes.weight * (bucket if zero.reshards_each else units.total)
    if zero.level >= 2 and zero.reduces_each:
        found += sizes.gradient * bucket
    return found


def _saved_bytes(facts: PlanInput, units: Units) -> int:
    """What a checkpoint holds of one rank: the weights that are trained, and both moments."""
    sizes = facts.sizes
    share = -(-units.total // facts.layout.dp) if facts.zero.level >= 1 else units.total
    return share * ((sizes.master or sizes.weight) + 2 * sizes.moment)


# Activations


def _activation_bytes(facts: PlanInput, stage: int) -> int:
    """Kept between forward and backward, by all micro-batches in flight."""
    parts = facts.parts(stage)
    in_flight = peak_in_flight(facts, stage)
    blocks = sum(_block_bytes(facts, facts.recompute[layer]) for layer in layers_of(parts))
    # Micro-batches in flight are counted in chunks; these differ by a layer at most.
    found = in_flight * blocks // len(parts)
    if any(part.is_first for part in parts):
        found += -(-in_flight // len(parts)) * _input_bytes(facts)
    if any(part.is_last for part in parts):
        # Its backward follows at once in every schedule but GPipe.
        held = facts.num_micro_batches if facts.schedule == "gpipe" else 1
        found += held * _output_bytes(facts)
    # Token ids and targets of the whole step are read before it.
    return found + 2 * facts.num_micro_batches * facts.tokens * _INDEX_BYTES


def _block_bytes(facts: PlanInput, mode: str) -> int:
    """What one block keeps of one micro-batch."""
    size, stream = facts.sizes.weight, facts.stream_values
    if mode == "full":
        return stream * size
    model, shape = facts.model, facts.model.shape
    per_token = facts.tokens // facts.layout.tp
    # Each norm's input and its output, which its linear layer keeps as a shard.
    norms = model.norms_per_block
    # A parallel block has one input to both of its norms.
    inputs = 1 if model.parallel_block else 2
    values = (inputs + norms) * stream
    statistics = norms * 2 * stream // shape.hidden
    # The projections before attention and before the non-linearity.
    values += per_token * (shape.qkv_width + shape.mlp_in_width)
    if model.rotary:
        values += per_token * (shape.hidden + shape.kv_width)
    # What goes into the projections back into the stream.
    values += per_token * (shape.hidden + shape.mlp_hidden)
    if mode != "selective":
        # Attention's own output, which is in another order than the projection reads it
        # unless there is one sequence or both branches are joined anyway.
        if facts.micro_batch > 1 or model.parallel_block:
            values += per_token * shape.hidden
        statistics += per_token * shape.heads
    masks = 2 * stream if model.dropout else 0
    return values * size + statistics * _STATISTIC_BYTES + masks


def _input_bytes(facts: PlanInput) -> int:
    """Rows of the token table and whether they are this rank's."""
    return facts.tokens * (_INDEX_BYTES + 1)


def _output_bytes(facts: PlanInput) -> int:
    """The last norm's input and output, and the loss's softmax."""
    return (2 * facts.stream_values + _logit_values(facts)) * facts.sizes.weight


def _logit_values(facts: PlanInput) -> int:
    return facts.tokens * facts.model.shape.vocab_size // facts.layout.tp


# Messages and moments


def _message_bytes(facts: PlanInput, stage: int) -> int:
    """Receive buffers: all of a step's are posted ahead, one each and direction."""
    if facts.layout.pp == 1:
        return 0
    parts = facts.parts(stage)
    neighbours = sum((not part.is_first) + (not part.is_last) for part in parts)
    return neighbours * facts.num_micro_batches * facts.stream_values * facts.sizes.weight


def _working_bytes(facts: PlanInput, stage: int, units: Units, activations: int) -> int:
    """The largest need of a moment, on top of everything that is kept."""
    parts = facts.parts(stage)
    is_last = any(part.is_last for part in parts)
    needs = [_block_backward_bytes(facts)]
    if any(mode == "full" for mode in (facts.recompute[n] for n in layers_of(parts))):
        # A block that is computed again keeps for a moment what it did not keep before.
        needs = [needs[0] + _block_bytes(facts, "none")]
    if is_last:
        needs.append(_loss_backward_bytes(facts))
    # The optimizer's step comes when all activations are gone.
    updated = units.total if facts.zero.level == 0 else -(-units.total // facts.layout.dp)
    needs.append(updated * facts.sizes.moment - activations)
    return max(needs)


def _loss_backward_bytes(facts: PlanInput) -> int:
    """The gradient of the logits; the softmax is gone when that of the weights is made."""
    table = facts.model.shape.vocab_size * facts.model.shape.hidden // facts.layout.tp
    whole_stream = facts.tokens * facts.model.shape.hidden
    return max(_logit_values(facts), table + 2 * whole_stream) * facts.sizes.weight


def _block_backward_bytes(facts: PlanInput) -> int:
    """Gradients of a linear layer, while those before it are already free."""
    shape, tp = facts.model.shape, facts.layout.tp
    widest = max(shape.mlp_in_width, shape.qkv_width)
    weight = shape.hidden * widest // tp
    values = facts.tokens * (widest // tp + shape.hidden) + weight
    return values * facts.sizes.weight
