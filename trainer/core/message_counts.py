"""How many messages a pass of one micro-batch waits for, beside the bytes that `traffic` counts.

A message is one collective, whatever the number of its ranks, or one send. What a collective takes
beyond its bytes grows with its ranks only where they stand in a ring and nothing else delays them.

What does not belong here: sums of a few numbers, as of norms over all heads and of routers, go
with one of these.
"""

from __future__ import annotations

from outlast.sizing.parameters import PlanInput, layer_kinds, layers_of, stage_units
from trainer.core.traffic import boundaries, layer_passes


def layer_messages(facts: PlanInput, stage: int) -> int:
    """Of a stage's linear layers within its tensor group."""
    if facts.layout.tp == 1:
        return 0
    kinds = layer_kinds(facts, facts.parts(stage))
    passes = sum(count * sum(layer_passes(facts, layer)) for layer, count in kinds.items())
    # An all-reduce is a gather and a reduce-scatter at once.
    return passes if facts.sequence_parallel else passes // 2


def end_messages(facts: PlanInput, stage: int) -> int:
    """What else a tensor group waits for: embedding, head, and the loss of each token."""
    if facts.layout.tp == 1:
        return 0
    parts = facts.parts(stage)
    ends = sum(part.is_first + part.is_last for part in parts)
    sums = any(part.is_last for part in parts)
    if facts.sequence_parallel:
        return 2 * ends + sums
    return ends + boundaries(facts, stage) + sums


def context_messages(facts: PlanInput, stage: int) -> tuple[int, int]:
    """Of ranks that divide sequences, in forward and in backward passes.

    Swapped: queries, keys and values in one there, outputs back. In a ring: one from each other
    rank, and backwards gradients come home as many times.
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
    """Of replicas that divide experts: how many tokens, these there and back, and the gradients."""
    if facts.layout.ep == 1:
        return 0
    return sum(
        count * (8 if facts.recompute[layer] == "full" else 5)
        for layer, count in layer_kinds(facts, facts.parts(stage)).items()
        if facts.model.shape.experts_of(layer) is not None
    )


def unit_messages(facts: PlanInput, stage: int) -> int:
    """Of replicas, to gather all weights of a stage once, or to sum all its gradients.

    One for each unit of ZeRO; sums are put together in buckets, which are no more.
    """
    if facts.layout.dp == 1:
        return 0
    units = stage_units(facts, stage)
    blocks = len(layers_of(facts.parts(stage)))
    return blocks + (units.input_ends > 0) + (units.output_ends > 0)
