"""A job spec as the numbers that its cost is computed from."""

from __future__ import annotations

from outlast.sizing.parameters import ModelFacts, PlanInput, ValueBytes, ZeroFacts, total_parameters
from outlast.spec import JobSpec, ModelSpec

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def plan_input(spec: JobSpec, *, on_gpu: bool = False) -> PlanInput:
    """The numbers of `spec` that decide what it needs; `on_gpu` changes what a moment needs."""
    parallel, zero = spec.parallel, spec.parallel.zero
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
            level=zero.level if spec.layout.dp > 1 else 0,
            reshards_each=(zero.reshard_after or by_default) == "micro_batch",
            reduces_each=(zero.reduce_after or by_default) == "micro_batch",
        ),
        recompute=recompute_modes(spec),
        offloaded=offloaded_layers(spec),
        micro_batch=parallel.micro_batch,
        global_batch=spec.data.global_batch,
        in_ring=parallel.context == "ring",
        optimizer=spec.optimizer.name,
        sizes=_value_bytes(spec),
        on_gpu=on_gpu,
    )


def recompute_modes(spec: JobSpec) -> tuple[str, ...]:
    """What the backward pass computes again, by layer: none, selective or full."""
    return tuple("full" if mode == "offload" else mode for mode in _modes(spec))


def offloaded_layers(spec: JobSpec) -> frozenset[int]:
    """Layers whose inputs are in host memory between their passes."""
    return frozenset(layer for layer, mode in enumerate(_modes(spec)) if mode == "offload")


def _modes(spec: JobSpec) -> tuple[str, ...]:
    modes = spec.parallel.recompute
    return (modes,) * spec.model.layers if isinstance(modes, str) else modes


def num_parameters(spec: JobSpec) -> int:
    """Parameters of the whole model, each counted once."""
    return total_parameters(plan_input(spec))


def _model_facts(model: ModelSpec) -> ModelFacts:
    parallel_block = model.block == "parallel"
    return ModelFacts(
        shape=model.shape,
        tied_embeddings=model.tied_embeddings,
        parallel_block=parallel_block,
        norms_per_block=_norms_per_block(model),
        norms_after=model.norm_place in ("after", "both"),
        last_norm=model.norm_place != "sum",
        block_biases=model.block_biases,
        norm_vectors=model.norm_vectors,
        learned_positions=model.positions == "learned",
        alibi=model.positions == "alibi",
        embedding_norm=model.embedding_norm,
        segments=model.segments,
        rotary=tuple(model.positions == "rope" and kind == "rope" for kind in model.rope_pattern),
        rms_norm=model.norm == "rmsnorm",
        qkv_bias=model.has_qkv_bias,
        attention_bias=model.attention_bias,
        qk_norm=model.qk_norm,
        mlp_bias=model.mlp_bias,
        head_bias=model.head_bias,
        head_transform=model.head_transform,
        sentence_order=model.sentence_order,
        dropout=model.dropout > 0,
        attention_dropout=model.attention_dropout > 0,
        attention_softcap=model.attention_softcap is not None,
        router_terms=model.moe.num_router_terms,
    )


def _norms_per_block(model: ModelSpec) -> int:
    if model.block == "parallel":
        return model.block_norms
    return 4 if model.norm_place == "both" else 2


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
