"""How many messages a pass of one micro-batch waits for, beside the bytes that `traffic` counts.

A message is one collective, whatever the number of its ranks, or one send. What a collective takes
beyond its bytes grows with its ranks only where they stand in a ring and nothing else delays them.
A test holds the counts of tensor, context and expert groups beside what the trainer's groups wait
for.
"""

from __future__ import annotations

from outlast.sizing.parameters import PlanInput, layer_kinds, layers_of, stage_units
from trainer.core.traffic import boundaries, layer_passes


def layer_messages(facts: PlanInput, stage: int) -> int:
    """Messages that a stage's layers wait for within their tensor group."""
    if facts.layout.tp == 1:
        return 0
    return sum(
        count * (_stream_messages(facts, layer) + _small_messages(facts, layer))
        for layer, count in layer_kinds(facts, facts.parts(stage)).items()
    )


def _stream_messages(facts: PlanInput, layer: int) -> int:
    """Messages that carry the residual stream."""
    passes = sum(layer_passes(facts, layer))
    # An all-reduce is a gather and a reduce-scatter at once.
    return passes if facts.sequence_parallel else passes // 2


def _small_messages(facts: PlanInput, layer: int) -> int:
    """Messages of norms of queries and keys, of shared heads, and of routers."""
    model, mode = facts.model, facts.recompute[layer]
    is_full = mode == "full"
    number = 0
    if model.qk_norm == "all":
        # Sums of squares, and their gradients.
        number += 2 + (mode != "none")
    elif model.qk_norm == "head" and not facts.sequence_parallel:
        # Gradients of both norms, of which each rank has those of its heads.
        number += 2
    if facts.ranks_of_kv_head > 1:
        # Weight, bias and norm of the heads that ranks share are gathered, and gradients summed.
        shared = 1 + model.qkv_bias + (model.qk_norm == "all")
        number += shared * (2 + is_full)
    if model.shape.experts_of(layer) is not None:
        # Chosen experts, their weights, and gradients of these.
        number += (1 + is_full) + (2 + is_full) if facts.sequence_parallel else 1
    return number


def end_messages(facts: PlanInput, stage: int) -> int:
    """Messages that a tensor group waits for besides: at embedding, head, and loss."""
    if facts.layout.tp == 1:
        return 0
    parts = facts.parts(stage)
    ends = sum(part.is_first + part.is_last for part in parts)
    sums = any(part.is_last for part in parts)
    if facts.sequence_parallel:
        return 2 * ends + sums * (1 + (facts.model.router_terms > 0))
    return ends + boundaries(facts, stage) + sums


def context_messages(facts: PlanInput, stage: int) -> tuple[int, int]:
    """Messages of ranks that divide sequences, in forward and in backward passes.

    Where heads are swapped, queries, keys and values go in one message, and outputs come back in
    another. In a ring there is one from each other rank, and backwards as many bring gradients.
    """
    cp = facts.layout.cp
    if cp == 1:
        return 0, 0
    forward, backward = (cp - 1, 2 * (cp - 1)) if facts.in_ring else (2, 2)
    kinds = layer_kinds(facts, facts.parts(stage))
    again = sum(count for layer, count in kinds.items() if facts.recompute[layer] != "none")
    layers = sum(kinds.values())
    return layers * forward, layers * backward + again * forward


def expert_messages(facts: PlanInput, stage: int) -> int:
    """Messages of replicas that divide experts.

    They say how many tokens come, bring them, and take them back; then gradients do the same.
    """
    if facts.layout.ep == 1:
        return 0
    return sum(
        count * (8 if facts.recompute[layer] == "full" else 5)
        for layer, count in layer_kinds(facts, facts.parts(stage)).items()
        if facts.model.shape.experts_of(layer) is not None
    )


def unit_messages(facts: PlanInput, stage: int) -> int:
    """About how many messages gather all weights of a stage among replicas, or sum its gradients.

    One for each block, and for each end of the model. Experts that replicas divide and a tied table
    add some, and so does a narrower type on the wire.
    """
    if facts.layout.dp == 1:
        return 0
    units = stage_units(facts, stage)
    blocks = len(layers_of(facts.parts(stage)))
    return blocks + (units.input_ends > 0) + (units.output_ends > 0)
