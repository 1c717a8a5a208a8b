"""What a job will need, before anything runs: parameters, FLOPs, memory, communication.

Plain arithmetic on plain numbers, used by `outlast plan`. Parameter counts are
exact (a test counts the model's); activation memory counts what the backward
pass of `trainer.model.gpt` keeps, so allocators may add to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.flops import flops_per_token as model_flops_per_token
from trainer.core import schedule as schedules
from trainer.core.partition import split_layers

# The stager keeps two rotating slots and one more for the upload in flight.
NUM_HOST_SLOTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """The numbers of a job spec that decide its cost."""

    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab_size: int
    seq_len: int
    tied_embeddings: bool
    tp: int
    pp: int
    dp: int
    sequence_parallel: bool
    schedule: str
    micro_batch: int
    global_batch: int
    bytes_per_value: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one replica runs per step."""
        return self.global_batch // (self.dp * self.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that one rank of a pipeline stage needs, by part."""

    stage: int
    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    host_slots_bytes: int

    @property
    def device_bytes(self) -> int:
        """All but the host-memory checkpoint slots."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a job will need."""

    world_size: int
    parameters: int
    flops_per_token: int
    tokens_per_step: int
    num_micro_batches: int
    stage_layers: tuple[int, ...]
    ranks: tuple[RankMemory, ...]
    """One entry a stage: all ranks of a stage need the same."""
    bubble: float
    peak_in_flight: tuple[int, ...]
    communication: Communication


def plan(facts: PlanInput) -> Plan:
    """The cost of the job that `facts` describe."""
    timing = schedules.check(schedules.build(facts.schedule, facts.pp, facts.num_micro_batches))
    stage_layers = tuple(len(part) for part in split_layers(facts.layers, facts.pp))
    ranks = tuple(
        _rank_memory(facts, stage, stage_layers[stage], timing.peak_in_flight[stage])
        for stage in range(facts.pp)
    )
    return Plan(
        world_size=facts.tp * facts.pp * facts.dp,
        parameters=total_parameters(facts),
        flops_per_token=flops_per_token(facts),
        tokens_per_step=facts.global_batch * facts.seq_len,
        num_micro_batches=facts.num_micro_batches,
        stage_layers=stage_layers,
        ranks=ranks,
        bubble=timing.bubble,
        peak_in_flight=timing.peak_in_flight,
        communication=_communication(facts, stage_layers, ranks),
    )


def total_parameters(facts: PlanInput) -> int:
    """Parameters of the whole model, each counted once."""
    blocks = facts.layers * _block_parameters(facts, 1)
    return (
        blocks
        + _input_parameters(facts, 1)
        + _output_parameters(facts, 1, own_head=not facts.tied_embeddings)
    )


def stage_parameters(facts: PlanInput, stage: int) -> int:
    """Parameters that one rank of `stage` holds. A tied head on a last stage is a copy."""
    num_layers = len(split_layers(facts.layers, facts.pp)[stage])
    count = num_layers * _block_parameters(facts, facts.tp)
    if stage == 0:
        count += _input_parameters(facts, facts.tp)
    if stage == facts.pp - 1:
        own_head = not facts.tied_embeddings or facts.pp > 1
        count += _output_parameters(facts, facts.tp, own_head=own_head)
    return count


def flops_per_token(facts: PlanInput) -> int:
    """Model FLOPs of forward and backward for one token."""
    return model_flops_per_token(
        layers=facts.layers,
        hidden=facts.hidden,
        mlp_hidden=facts.mlp_hidden,
        vocab_size=facts.vocab_size,
        seq_len=facts.seq_len,
    )


def _block_parameters(facts: PlanInput, tp: int) -> int:
    h, f = facts.hidden, facts.mlp_hidden
    sharded = 3 * h * h + 3 * h + h * h + h * f + f + f * h
    replicated = 4 * h + 2 * h  # two LayerNorms; the biases of the two row-parallel layers
    return sharded // tp + replicated


def _input_parameters(facts: PlanInput, tp: int) -> int:
    return facts.vocab_size * facts.hidden // tp + facts.seq_len * facts.hidden


def _output_parameters(facts: PlanInput, tp: int, *, own_head: bool) -> int:
    head = facts.vocab_size * facts.hidden // tp if own_head else 0
    return 2 * facts.hidden + head


def _rank_memory(facts: PlanInput, stage: int, num_layers: int, in_flight: int) -> RankMemory:
    parameters = stage_parameters(facts, stage)
    size = facts.bytes_per_value
    values = in_flight * num_layers * _block_activations(facts)
    if stage == facts.pp - 1:
        values += _output_activations(facts)
    # All receives of a step are posted ahead: one buffer per micro-batch and direction.
    neighbours = (stage > 0) + (stage < facts.pp - 1)
    values += neighbours * facts.num_micro_batches * _boundary_values(facts)
    return RankMemory(
        stage=stage,
        parameters=parameters,
        weights_bytes=parameters * size,
        gradients_bytes=parameters * size,
        optimizer_bytes=2 * parameters * size,
        activations_bytes=values * size,
        host_slots_bytes=NUM_HOST_SLOTS * 3 * parameters * size,
    )


def _boundary_values(facts: PlanInput) -> int:
    values = facts.seq_len * facts.micro_batch * facts.hidden
    return values // facts.tp if facts.sequence_parallel else values


def _block_activations(facts: PlanInput) -> int:
    """Values that one block keeps for its backward pass, per micro-batch."""
    tokens = facts.seq_len * facts.micro_batch
    # Inputs and outputs of the two LayerNorms; then q, k, v, the attention
    # output in two memory orders, and the MLP before and after its GELU.
    norms = 4 * _boundary_values(facts)
    sharded = 5 * tokens * facts.hidden + 2 * tokens * facts.mlp_hidden
    return norms + sharded // facts.tp


def _output_activations(facts: PlanInput) -> int:
    tokens = facts.seq_len * facts.micro_batch
    return 2 * _boundary_values(facts) + tokens * facts.vocab_size // facts.tp


def _communication(
    facts: PlanInput, stage_layers: tuple[int, ...], ranks: tuple[RankMemory, ...]
) -> Communication:
    size = facts.bytes_per_value
    tokens_bytes = facts.seq_len * facts.micro_batch * facts.hidden * size
    # With sequence parallelism a layer's four linears gather or reduce-scatter
    # ten times (the gathered input is not kept but gathered again); without it,
    # four all-reduces of twice the bytes.
    passes = 10 if facts.sequence_parallel else 8
    per_micro_batch = max(stage_layers) * passes * tokens_bytes * (facts.tp - 1) // facts.tp
    links = 0 if facts.pp == 1 else (1 if facts.pp == 2 else 2)
    gradients = max(rank.gradients_bytes for rank in ranks)
    tied = facts.tied_embeddings and facts.pp > 1
    return Communication(
        tp_bytes=facts.num_micro_batches * per_micro_batch,
        pp_bytes=facts.num_micro_batches * links * _boundary_values(facts) * size,
        dp_bytes=2 * gradients * (facts.dp - 1) // facts.dp,
        embedding_bytes=facts.vocab_size * facts.hidden // facts.tp * size if tied else 0,
    )
