"""Bytes that a rank sends per step, by the group it sends them in.

A gather or a reduce-scatter over n ranks sends (n - 1)/n of the whole, an
all-reduce twice that. Sources: Korthikanti et al. (arXiv 2205.05198) for tensor
parallelism, ZeRO (arXiv 1910.02054) for replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.core.memory import RankMemory
from trainer.core.sizes import PlanInput, layers_of

# With sequence parallelism a pair of linear layers gathers, then reduce-scatters. Backward it
# does both the other way round, and gathers the input again, of which it kept a shard.
_PAIR_FORWARD, _PAIR_BACKWARD = 2, 3
# Without, one all-reduce each way, as many bytes as a gather and a reduce-scatter.
_WHOLE_FORWARD, _WHOLE_BACKWARD = 2, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that the busiest rank sends per step, by the group it sends them in."""

    tp_bytes: int
    pp_bytes: int
    dp_bytes: int
    embedding_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.tp_bytes + self.pp_bytes + self.dp_bytes + self.embedding_bytes


def communication(facts: PlanInput, ranks: tuple[RankMemory, ...]) -> Communication:
    """What the busiest rank of each dimension sends."""
    stages = range(facts.layout.pp)
    sizes, tp = facts.sizes, facts.layout.tp
    table = facts.model.shape.vocab_size * facts.model.shape.hidden // tp
    return Communication(
        tp_bytes=max(_tensor_bytes(facts, stage) for stage in stages),
        pp_bytes=max(_pipeline_bytes(facts, stage) for stage in stages),
        dp_bytes=max(_replica_bytes(facts, rank.parameters) for rank in ranks),
        # Two ranks swap their gradients.
        embedding_bytes=table * sizes.gradient
        if facts.splits_tied_table and facts.layout.pp > 1
        else 0,
    )


def layer_passes(facts: PlanInput, mode: str) -> tuple[int, int]:
    """Messages of one layer and micro-batch, forward and backward, in streams of (t - 1)/t."""
    pairs = 1 if facts.model.parallel_block else 2
    if facts.sequence_parallel:
        forward, backward = _PAIR_FORWARD, _PAIR_BACKWARD
    else:
        forward, backward = _WHOLE_FORWARD, _WHOLE_BACKWARD
    again = forward if mode == "full" else 0
    return pairs * forward, pairs * (backward + again)


def stream_bytes(facts: PlanInput) -> float:
    """What one gather of a micro-batch's residual stream sends."""
    tp = facts.layout.tp
    return facts.tokens * facts.model.shape.hidden * facts.sizes.weight * (tp - 1) / tp


def _tensor_bytes(facts: PlanInput, stage: int) -> int:
    parts = facts.parts(stage)
    passes = sum(sum(layer_passes(facts, facts.recompute[n])) for n in layers_of(parts))
    if any(part.is_first for part in parts):
        passes += 2
    if any(part.is_last for part in parts):
        passes += 3 if facts.sequence_parallel else 2
    return round(facts.num_micro_batches * passes * stream_bytes(facts))


def _pipeline_bytes(facts: PlanInput, stage: int) -> int:
    """Each chunk sends its output on, and the gradient of its input back; 1/t of it each rank."""
    if facts.layout.pp == 1:
        return 0
    sends = sum((not part.is_first) + (not part.is_last) for part in facts.parts(stage))
    boundary = facts.tokens * facts.model.shape.hidden // facts.layout.tp
    return facts.num_micro_batches * sends * boundary * facts.sizes.weight


def _replica_bytes(facts: PlanInput, parameters: int) -> int:
    """Level 0: an all-reduce. Above, gradients are reduced to shards and weights gathered."""
    sizes, zero, dp = facts.sizes, facts.zero, facts.layout.dp
    reduced = parameters * sizes.gradient_sent
    if zero.level == 0:
        return 2 * reduced * (dp - 1) // dp
    if zero.level >= 2 and zero.reduces_each:
        reduced *= facts.num_micro_batches
    gathered = parameters * sizes.weight
    if zero.level == 3 and zero.reshards_each:
        # Before the forward and again before the backward of each micro-batch.
        gathered *= 2 * facts.num_micro_batches
    return (reduced + gathered) * (dp - 1) // dp
