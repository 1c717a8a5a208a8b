"""A job spec as the numbers that its cost is computed from. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from checkpoint.core.slots import NUM_HELD_SLOTS
from checkpoint.placing import num_own_slots, placement_of, slots_on_nodes
from outlast.blackbox import Expected
from outlast.spec import JobSpec, ModelSpec
from trainer.core.memory import host_slot_bytes, rank_memory
from trainer.core.sizes import ModelFacts, PlanInput, ValueBytes, ZeroFacts, total_parameters
from trainer.core.timing import bubble

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def plan_input(spec: JobSpec, *, on_gpu: bool = False) -> PlanInput:
    """The numbers of `spec` that decide what it needs; `on_gpu` changes what a moment needs."""
    parallel, zero = spec.parallel, spec.parallel.zero
    modes = parallel.recompute
    # One gather of a pipeline's step serves all of its micro-batches.
    by_default = "step" if parallel.pp > 1 else "micro_batch"
    return PlanInput(
        model=_model_facts(spec.model),
        layout=spec.layout,
        # One tensor-parallel rank has the whole sequence either way.
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        tp_chunks=parallel.tp_chunks,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        extra_warmup=parallel.extra_warmup,
        layer_split=parallel.layer_split,
        zero=ZeroFacts(
            # Alone, a rank keeps everything whatever the level says.
            level=zero.level if parallel.dp > 1 else 0,
            reshards_each=(zero.reshard_after or by_default) == "micro_batch",
            reduces_each=(zero.reduce_after or by_default) == "micro_batch",
        ),
        recompute=(modes,) * spec.model.layers if isinstance(modes, str) else modes,
        micro_batch=parallel.micro_batch,
        global_batch=spec.data.global_batch,
        optimizer=spec.optimizer.name,
        sizes=_value_bytes(spec),
        on_gpu=on_gpu,
    )


def num_parameters(spec: JobSpec) -> int:
    """Parameters of the whole model, each counted once."""
    return total_parameters(plan_input(spec))


def expected_of(spec: JobSpec, stage: int, *, on_gpu: bool) -> Expected:
    """What a rank of `stage` should need, to be held beside what it measures."""
    facts = plan_input(spec, on_gpu=on_gpu)
    return Expected(memory_bytes=rank_memory(facts, stage).device_bytes, bubble=bubble(facts))


def host_memory_bytes(spec: JobSpec, ranks: Iterable[int]) -> int:
    """Enough tmpfs for the host-memory checkpoints of these ranks, which share a node.

    Copies that the node keeps for another one are part of it.
    """
    placement = placement_of(spec)
    slots = dict.fromkeys(ranks, num_own_slots(placement))
    if placement is not None:
        for place in {rank // spec.workers_per_node for rank in slots}:
            slots |= dict.fromkeys(placement.held_on(str(place)), NUM_HELD_SLOTS)
    return _slots_bytes(spec, slots)


def node_host_memory_bytes(spec: JobSpec) -> int:
    """Enough tmpfs for any node of the job, which holds consecutive ranks."""
    # Of many nodes few hold different numbers of slots of each stage.
    kinds = {_by_stage(spec, slots) for slots in slots_on_nodes(spec)}
    return max(_stages_bytes(spec, kinds))


def _slots_bytes(spec: JobSpec, slots: Mapping[int, int]) -> int:
    """Bytes of so many slots of each rank."""
    return _stages_bytes(spec, [_by_stage(spec, slots)])[0]


def _by_stage(spec: JobSpec, slots: Mapping[int, int]) -> frozenset[tuple[int, int]]:
    """How many slots of each stage there are."""
    counts: Counter[int] = Counter()
    ranks_per_stage = spec.parallel.tp * spec.parallel.dp
    for rank, count in slots.items():
        counts[rank // ranks_per_stage] += count
    return frozenset(counts.items())


def _stages_bytes(spec: JobSpec, nodes: Collection[Collection[tuple[int, int]]]) -> list[int]:
    """Bytes of so many slots of each stage, for each of some nodes."""
    facts = plan_input(spec)
    stages = {stage for counts in nodes for stage, _ in counts}
    each = {stage: host_slot_bytes(facts, stage) for stage in stages}
    return [sum(count * each[stage] for stage, count in counts) for counts in nodes]


def _model_facts(model: ModelSpec) -> ModelFacts:
    parallel_block = model.block == "parallel"
    return ModelFacts(
        shape=model.shape,
        tied_embeddings=model.tied_embeddings,
        parallel_block=parallel_block,
        norms_per_block=model.block_norms if parallel_block else 2,
        norm_vectors=2 if model.norm == "layernorm" and model.norm_bias else 1,
        learned_positions=model.positions == "learned",
        rotary=model.positions == "rope",
        rms_norm=model.norm == "rmsnorm",
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
        head_bias=model.head_bias,
        dropout=model.dropout > 0,
        attention_dropout=model.attention_dropout > 0,
    )


def _value_bytes(spec: JobSpec) -> ValueBytes:
    weight = _BYTES[spec.precision]
    # 16-bit weights are a copy: sums, master weights and moments are fp32.
    exact = max(4, weight)
    sent = spec.parallel.zero.communication
    return ValueBytes(
        weight=weight,
        gradient=exact,
        master=exact if weight < exact else 0,
        moment=exact,
        gradient_sent=exact if sent is None else _BYTES[sent],
    )
