"""Bytes that a rank sends per step, by the group it sends them in.

A gather or a reduce-scatter over n ranks sends (n - 1)/n of the whole, an
all-reduce twice that. A test holds the sums beside what the trainer's groups
count. Sources: Korthikanti et al. (arXiv 2205.05198) for tensor parallelism,
ZeRO (arXiv 1910.02054) for replicas, DeepSpeed-Ulysses (2309.14509) for parts of a sequence.

What does not belong here: evaluations, and the few numbers that all ranks agree
on once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outlast.sizing.parameters import PlanInput, layer_kinds, stage_units, summed_by_tensor_ranks

# Of the sums over the vocabulary: largest logit, normaliser, the target's logit.
_NUMBERS_PER_TOKEN = 3
# Losses are at least fp32.
_LOSS_BYTES = 4
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that the busiest rank sends per step, by the group it sends them in."""

    tp_bytes: int
    pp_bytes: int
    dp_bytes: int
    cp_bytes: int
    ep_bytes: int
    """Where each expert is chosen as often."""
    embedding_bytes: int

    @property
    def total_bytes(self) -> int:
        others = self.cp_bytes + self.ep_bytes + self.embedding_bytes
        return self.tp_bytes + self.pp_bytes + self.dp_bytes + others


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMessages:
    """What a rank sends to its replicas, and in how many of a step's passes."""

    gathered_bytes: int
    """One gather of all weights."""
    gathered_again_bytes: int
    """One gather of what a backward pass needs: all but the token and position tables."""
    reduced_bytes: int
    """One sum of all gradients."""
    forward_gathers: int
    backward_gathers: int
    reductions: int

    @property
    def total_bytes(self) -> int:
        return (
            self.forward_gathers * self.gathered_bytes
            + self.backward_gathers * self.gathered_again_bytes
            + self.reductions * self.reduced_bytes
        )


def communication(facts: PlanInput) -> Communication:
    """What the busiest rank of each dimension sends."""
    stages = range(facts.layout.pp)
    return Communication(
        tp_bytes=max(_tensor_bytes(facts, stage) for stage in stages),
        pp_bytes=max(_pipeline_bytes(facts, stage) for stage in stages),
        dp_bytes=max(replica_messages(facts, stage).total_bytes for stage in stages),
        cp_bytes=max(facts.num_micro_batches * context_bytes(facts, stage) for stage in stages),
        ep_bytes=max(facts.num_micro_batches * expert_bytes(facts, stage) for stage in stages),
        embedding_bytes=embedding_bytes(facts),
    )


def context_bytes(facts: PlanInput, stage: int) -> int:
    """What a stage sends to ranks that divide sequences with it, for one micro-batch."""
    return sum(context_passes(facts, stage))


def context_passes(facts: PlanInput, stage: int) -> tuple[int, int]:
    """The same of forward and of backward passes; forward once more where attention is recomputed.

    Swapped: queries, keys and values of a layer's tokens there, its outputs back, and the gradients
    of all. In a ring: the keys and values of all others, and backwards their gradients, too, in
    fp32 at least.
    """
    shape, layout, weight = facts.model.shape, facts.layout, facts.sizes.weight
    kv_values = 2 * shape.kv_width * facts.ranks_of_kv_head * facts.copies_of_kv_head
    kv_values = facts.tokens * kv_values // layout.tp
    if facts.in_ring:
        forward = (layout.cp - 1) * kv_values * weight
        backward = forward + (layout.cp - 1) * kv_values * max(_LOSS_BYTES, weight)
    else:
        values = kv_values + facts.tokens * 2 * shape.query_width // layout.tp
        forward = backward = values * weight * (layout.cp - 1) // layout.cp
    kinds = layer_kinds(facts, facts.parts(stage))
    again = sum(count for layer, count in kinds.items() if facts.recompute[layer] != "none")
    layers = sum(kinds.values())
    return layers * forward, layers * backward + again * forward


def expert_bytes(facts: PlanInput, stage: int) -> int:
    """What a stage sends to replicas that have the experts of its tokens, for one micro-batch.

    Each token to each of its experts and back, and the gradients of both.
    """
    ep, shape = facts.layout.ep, facts.model.shape
    sent = 0
    for layer, count in layer_kinds(facts, facts.parts(stage)).items():
        experts = shape.experts_of(layer)
        if experts is not None:
            passes = 6 if facts.recompute[layer] == "full" else 4
            sent += count * passes * facts.tokens * experts.per_token * shape.hidden
    return sent * facts.sizes.weight * (ep - 1) // ep


def layer_bytes(facts: PlanInput, stage: int) -> float:
    """What a stage's linear layers send to their tensor group for one micro-batch."""
    kinds = layer_kinds(facts, facts.parts(stage))
    passes = sum(count * sum(layer_passes(facts, layer)) for layer, count in kinds.items())
    routing = sum(count * _routing_bytes(facts, layer) for layer, count in kinds.items())
    norms = _qk_norm_bytes(facts, kinds)
    return passes * _stream_bytes(facts) + routing + norms + _shared_head_bytes(facts, kinds)


def _qk_norm_bytes(facts: PlanInput, kinds: Mapping[int, int]) -> float:
    """Sums of squares of all queries and of all keys of a token, and their gradients."""
    if facts.model.qk_norm != "all":
        return 0.0
    tp, exact = facts.layout.tp, max(_LOSS_BYTES, facts.sizes.weight)
    uses = sum(count * (2 + (facts.recompute[layer] != "none")) for layer, count in kinds.items())
    return uses * 2 * facts.tokens * exact * 2 * (tp - 1) / tp


def _routing_bytes(facts: PlanInput, layer: int) -> float:
    """The experts that tokens of other ranks go to, and their weights with gradients."""
    experts, tp = facts.model.shape.experts_of(layer), facts.layout.tp
    if experts is None:
        return 0.0
    exact = max(_LOSS_BYTES, facts.sizes.weight)
    weights = facts.tokens * (experts.per_token + experts.shared_gate) * exact
    chosen = facts.tokens * experts.per_token * _INDEX_BYTES
    # Without sequence parallelism all ranks have routed all tokens, and sum gradients of weights.
    sent = 2 * weights
    if facts.sequence_parallel:
        again = facts.recompute[layer] == "full"
        sent = (1 + again) * chosen + (2 + again) * weights
    return sent * (tp - 1) / tp


def _shared_head_bytes(facts: PlanInput, kinds: Mapping[int, int]) -> float:
    """Ranks that share a key/value head gather its weights; back come sums of gradients."""
    if facts.ranks_of_kv_head == 1:
        return 0.0
    shape, tp = facts.model.shape, facts.layout.tp
    rows = 2 * shape.kv_width * (shape.hidden + facts.model.qkv_bias)
    rows += shape.kv_width * (facts.model.qk_norm == "all")
    uses = sum(count * (2 + (facts.recompute[layer] == "full")) for layer, count in kinds.items())
    return uses * rows * facts.sizes.weight * (tp - 1) / tp


def layer_passes(facts: PlanInput, layer: int) -> tuple[int, int]:
    """Messages of one layer and micro-batch, forward and backward, in streams of (t - 1)/t.

    With sequence parallelism linear layers gather before columns and reduce-scatter
    after rows. Backward it is the other way round, and columns gather their input
    again, of which they kept a shard. Without, rows end in an all-reduce, which is as
    many bytes as both, and so does the backward pass of columns. Weight gradients that
    are put off gather the gradient of rows once more.
    """
    model, mode = facts.model, facts.recompute[layer]
    columns, rows = 2, 1 if model.parallel_block else 2
    if model.parallel_block and model.norms_per_block == 1:
        # One projection of the one input serves both branches.
        columns = 1
    if facts.sequence_parallel:
        forward, backward = columns + rows, 2 * columns + rows
        if facts.splits_backward:
            backward += rows
        if model.shape.experts_of(layer) is not None:
            # Experts keep the tokens that they were given, and the gradients of what they made.
            backward -= 2 if facts.splits_backward else 1
    else:
        forward, backward = 2 * rows, 2 * columns
    again = forward if mode == "full" else 0
    return forward, backward + again


def end_bytes(facts: PlanInput, stage: int) -> float:
    """What else a stage sends to its tensor group for one micro-batch.

    The embedding's sum, the head's input and its gradient, the loss of each token; and
    without sequence parallelism the gathers of what came from other stages in parts.
    """
    parts, tp = facts.parts(stage), facts.layout.tp
    # Both ends are one all-reduce, or a gather and a reduce-scatter.
    passes = sum(2 * part.is_first + 2 * part.is_last for part in parts)
    if not facts.sequence_parallel:
        passes += boundaries(facts, stage)
    sums = 0
    if any(part.is_last for part in parts):
        width = max(_LOSS_BYTES, facts.sizes.weight)
        sums = _NUMBERS_PER_TOKEN * facts.tokens * width * (tp - 1)
    return passes * _stream_bytes(facts) + sums


def message_bytes(facts: PlanInput) -> int:
    """What one rank sends from a chunk to the next one: 1/t of the stream."""
    hidden = facts.model.shape.hidden
    sent = facts.tokens * hidden // facts.layout.tp * facts.sizes.weight
    # `trainer.model.carried`: whole rows hold the terms of the router's losses.
    row_bytes = facts.micro_batch * hidden * facts.sizes.weight
    carried = facts.model.router_terms * max(_LOSS_BYTES, facts.sizes.weight)
    rows = -(-carried // row_bytes)
    return sent + row_bytes * rows * (facts.layout.tp if facts.sequence_parallel else 1)


def replica_messages(facts: PlanInput, stage: int) -> ReplicaMessages:
    """Level 0: an all-reduce. Above, gradients are reduced to shards and weights gathered."""
    sizes, zero, layout = facts.sizes, facts.zero, facts.layout
    units, each = stage_units(facts, stage), facts.num_micro_batches

    def others(common: int) -> int:
        """Of parameters that all replicas have, and of experts, what goes to other replicas."""
        holders = layout.dp // layout.ep
        experts = sum(units.divided) * (holders - 1) // holders
        return common * (layout.dp - 1) // layout.dp + experts

    reduced = others(units.common) * sizes.gradient_sent
    again = units.common - units.input_ends + units.input_norm
    gathers_each = zero.level == 3 and zero.reshards_each
    # What both chunks of a rank use is dropped between them.
    shared = units.input_ends - units.input_norm if facts.shares_table and gathers_each else 0
    again += shared
    return ReplicaMessages(
        gathered_bytes=others(units.common + shared) * sizes.weight,
        gathered_again_bytes=others(again) * sizes.weight,
        reduced_bytes=2 * reduced if zero.level == 0 else reduced,
        forward_gathers=(each if gathers_each else 1) if zero.level else 0,
        backward_gathers=each if gathers_each else 0,
        reductions=each if zero.level >= 2 and zero.reduces_each else 1,
    )


def embedding_bytes(facts: PlanInput) -> int:
    """Two stages swap the gradients of a tied table that each has a copy of."""
    if not facts.splits_tied_table or facts.layout.pp == 1:
        return 0
    table = facts.model.shape.vocab_size * facts.model.shape.hidden // facts.layout.tp
    # Replicas have summed them before, with ZeRO into shards.
    share = facts.layout.dp if facts.zero.level else 1
    return table // share * facts.sizes.gradient


def _tensor_bytes(facts: PlanInput, stage: int) -> int:
    each = layer_bytes(facts, stage) + end_bytes(facts, stage)
    tp = facts.layout.tp
    once = 0.0
    if facts.sequence_parallel:
        # Each rank's gradients of what all of them hold are of its part of the sequence.
        summed = summed_by_tensor_ranks(facts, stage) * facts.sizes.gradient
        once = 2 * summed * (tp - 1) / tp
    return round(facts.num_micro_batches * each + once)


def _pipeline_bytes(facts: PlanInput, stage: int) -> int:
    """Each chunk sends its output on, and the gradient of its input back."""
    return facts.num_micro_batches * boundaries(facts, stage) * message_bytes(facts)


def boundaries(facts: PlanInput, stage: int) -> int:
    """Sides of a stage's chunks that face another stage; each sends one way, receives the other."""
    if facts.layout.pp == 1:
        return 0
    sides = sum((not part.is_first) + (not part.is_last) for part in facts.parts(stage))
    # Where the pipeline folds, one chunk is the other one's neighbour.
    return sides - 2 if facts.folds and stage == facts.layout.pp - 1 else sides


def _stream_bytes(facts: PlanInput) -> float:
    """What one gather of a micro-batch's residual stream sends."""
    tp = facts.layout.tp
    return facts.tokens * facts.model.shape.hidden * facts.sizes.weight * (tp - 1) / tp
