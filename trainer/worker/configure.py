"""The sections of the spec, each in the words of the part that it is for."""

from __future__ import annotations

from dataclasses import replace

import torch

from outlast.spec import JobSpec, ModelSpec
from trainer.data.prepare import DataOptions
from trainer.model.config import GptConfig, MoeConfig, RopeConfig, RopeScaling
from trainer.model.parameters import FlatParameters
from trainer.optim.adam import AdamWConfig
from trainer.optim.adamw import FlatAdamW
from trainer.optim.lamb import FlatLamb, LambConfig
from trainer.optim.loss_scale import LossScale
from trainer.optim.schedule import LearningRate
from trainer.parallel.mesh import Mesh
from trainer.parallel.zero import ZeroConfig

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

# Fields of the model section that the config has by the same name.
_ALIKE = (
    *("layers", "hidden", "heads", "mlp_hidden", "vocab_size", "seq_len", "tied_embeddings"),
    *("norm_eps", "init_std", "kv_heads", "vocab_rows", "block", "block_norms", "block_biases"),
    *("norm", "norm_bias", "norm_place", "norm_weight", "qk_norm", "activation", "rope_pattern"),
    *("window", "window_pattern", "attention_bias", "qkv_bias", "mlp_bias", "head_bias"),
    *("head_transform", "segments", "sentence_order"),
    *("embedding_scale", "embedding_norm", "attention_scale", "attention_softcap"),
    *("logit_softcap", "residual_scale", "logit_scale", "dropout", "attention_dropout"),
)


def gpt_config(spec: JobSpec) -> GptConfig:
    """The model section of the spec, in the model's own words, and what documents are to it."""
    model, parallel = spec.model, spec.parallel
    return GptConfig(
        sequence_parallel=parallel.sequence_parallel,
        dtype=DTYPES[spec.precision],
        head_dim=model.head_width,
        bidirectional=model.attention == "bidirectional",
        documents_apart=spec.data.keeps_documents_apart,
        resets_positions=spec.data.resets_positions,
        moe=_moe(model),
        learned_positions=model.positions == "learned",
        alibi=model.positions == "alibi",
        rope=_rope(model),
        local_rope=_local_rope(model),
        seed=spec.seed,
        context=parallel.context,
        tp_chunks=parallel.tp_chunks,
        recompute=parallel.recompute,
        **{name: getattr(model, name) for name in _ALIKE},
    )


def _moe(model: ModelSpec) -> MoeConfig | None:
    given = model.moe
    if given.num_experts == 0:
        return None
    return MoeConfig(
        num_experts=given.num_experts,
        per_token=given.experts_per_token,
        hidden=model.expert_hidden,
        normalises=given.norm_topk_prob,
        shared_hidden=given.shared_ffn_hidden,
        shared_gate=given.shared_gate,
        pattern=given.pattern,
        aux_loss=given.router_aux_loss_coef,
        aux_loss_over=given.router_aux_loss_over,
        z_loss=given.router_z_loss_coef,
        num_terms=given.num_router_terms,
    )


def _rope(model: ModelSpec) -> RopeConfig | None:
    if model.positions != "rope":
        return None
    return RopeConfig(
        theta=model.rope_theta,
        fraction=model.rope_fraction,
        pairs=model.rope_pairs,
        scaling=_rope_scaling(model),
    )


def _local_rope(model: ModelSpec) -> RopeConfig | None:
    rope, theta = _rope(model), model.rope_local_theta
    return None if rope is None or theta is None else replace(rope, theta=theta, scaling=None)


def _rope_scaling(model: ModelSpec) -> RopeScaling | None:
    given = model.rope_scaling
    if given.kind == "none":
        return None
    return RopeScaling(
        kind=given.kind,
        factor=given.factor,
        original_seq_len=given.original_seq_len or model.seq_len,
        low_freq_factor=given.low_freq_factor,
        high_freq_factor=given.high_freq_factor,
        beta_fast=given.beta_fast,
        beta_slow=given.beta_slow,
        attention_factor=given.attention_factor,
    )


def data_options(spec: JobSpec) -> DataOptions:
    """What decides the content of the token files."""
    return DataOptions(
        source=spec.data.source,
        tokenizer=spec.data.tokenizer,
        validation_fraction=spec.data.validation_fraction,
        max_bytes=spec.data.max_bytes,
    )


def zero_config(spec: JobSpec) -> ZeroConfig:
    """What ZeRO trades, with the defaults that depend on the pipeline."""
    zero = spec.parallel.zero
    # A pipeline's stage uses its chunks many times a step: gathering each time would cost
    # more than the memory is worth.
    default = "step" if spec.parallel.pp > 1 else "micro_batch"
    return ZeroConfig(
        reshard_each_micro_batch=(zero.reshard_after or default) == "micro_batch",
        reduce_each_micro_batch=(zero.reduce_after or default) == "micro_batch",
        wire=None if zero.communication is None else DTYPES[zero.communication],
    )


def optimizer(spec: JobSpec, flat: FlatParameters, mesh: Mesh) -> FlatAdamW | FlatLamb:
    """The optimizer that the spec names, over what this rank owns."""
    given = spec.optimizer
    adam = AdamWConfig(
        beta1=given.beta1, beta2=given.beta2, eps=given.eps, weight_decay=given.weight_decay
    )
    if given.name == "adamw":
        return FlatAdamW(flat, adam)
    config = LambConfig(adam=adam, phi_min=given.lamb.phi_min, phi_max=given.lamb.phi_max)
    return FlatLamb(flat, config, mesh)


def learning_rate(spec: JobSpec) -> LearningRate:
    """The learning rate over the steps of the job."""
    given = spec.optimizer
    return LearningRate(
        name=given.schedule.name,
        peak=given.lr,
        warmup_steps=given.schedule.warmup_steps,
        min_ratio=given.schedule.min_ratio,
        steps=spec.steps,
        decay_steps=given.schedule.decay_steps or max(1, spec.steps // 10),
    )


def loss_scale(spec: JobSpec) -> LossScale | None:
    """The loss scale that fp16 needs; None for other precisions."""
    if spec.precision != "fp16":
        return None
    given = spec.loss_scale
    return LossScale(
        scale=given.initial, growth_interval=given.growth_interval, minimum=given.minimum
    )
