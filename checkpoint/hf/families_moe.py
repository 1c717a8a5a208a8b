"""Families with a mixture of experts."""

from __future__ import annotations

from functools import partial

from checkpoint.hf import options
from checkpoint.hf.family import (
    ATTENTION_BIAS,
    GRANITE_SCALES,
    HEAD_DIM,
    RMS,
    RMS_EPS,
    SHAPE,
    UNBIASED,
    Family,
    gate,
    rms_eps,
    tied,
)
from checkpoint.hf.options import Config, Fields, Mixed, Option
from checkpoint.hf.tensors_moe import granite_moe_rules, mixtral_rules, qwen_moe_rules
from outlast.model import ModelSpec

# Of Qwen 3 there are files with either.
_NUM_EXPERTS = ("num_experts", "num_local_experts")


def _read_losses(config: Config) -> Fields:
    """`transformers` adds the router's loss only where it gives the router's logits."""
    coefficient = config.get("router_aux_loss_coef", 0.001)
    if not config.get("output_router_logits") or not coefficient:
        return {}
    return {"router_aux_loss_coef": coefficient, "router_aux_loss_over": "model"}


def _write_losses(model: ModelSpec) -> Fields:
    moe = model.moe
    if not moe.router_aux_loss_coef:
        return {"output_router_logits": False}
    return {"output_router_logits": True, "router_aux_loss_coef": moe.router_aux_loss_coef}


_LOSSES = ("output_router_logits", "router_aux_loss_coef")


def _read_mixtral(config: Config) -> Fields:
    moe = {
        "num_experts": config.get("num_local_experts", 8),
        "experts_per_token": config.get("num_experts_per_tok", 2),
        **_read_losses(config),
    }
    return {"moe": moe}


def _write_mixtral(model: ModelSpec) -> Fields:
    return {
        # Its layers have nothing but experts.
        "intermediate_size": model.expert_hidden,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.experts_per_token,
        **_write_losses(model),
    }


def _read_granite(config: Config) -> Fields:
    moe = _read_mixtral(config)["moe"]
    return {"moe": {**moe, "shared_ffn_hidden": config.get("shared_intermediate_size", 0)}}


def _write_granite(model: ModelSpec) -> Fields:
    return {**_write_mixtral(model), "shared_intermediate_size": model.moe.shared_ffn_hidden}


def _read_qwen(config: Config, *, number: int, per_token: int, shared: int) -> Fields:
    """`number`, `per_token`, `shared`: what counts where the config does not say it."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(options.required(config, "num_hidden_layers"))
    kinds = ["dense" if layer in dense or (layer + 1) % step else "experts" for layer in layers]
    found = [config[name] for name in _NUM_EXPERTS if config.get(name) is not None]
    if "experts" not in kinds or 0 in found:
        raise options.refused("num_experts", 0, "allowed: models in which a layer has experts")
    moe = {
        "num_experts": found[0] if found else number,
        "experts_per_token": config.get("num_experts_per_tok", per_token),
        "ffn_hidden": options.required(config, "moe_intermediate_size"),
        "norm_topk_prob": config.get("norm_topk_prob", False),
        "pattern": options.shortest(kinds),
        **_read_losses(config),
    }
    if shared:
        width = config.get("shared_expert_intermediate_size", shared)
        moe |= {"shared_ffn_hidden": width, "shared_gate": True}
    return {"moe": moe}


def _write_qwen(model: ModelSpec, *, has_shared: bool) -> Fields:
    moe = model.moe
    kinds = [moe.pattern[layer % len(moe.pattern)] for layer in range(model.layers)]
    shared = {"shared_expert_intermediate_size": moe.shared_ffn_hidden} if has_shared else {}
    return {
        ("num_experts" if has_shared else "num_local_experts"): moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"],
        **shared,
        **_write_losses(model),
    }


def _read_no_windows(config: Config) -> Fields:
    """Releases of `transformers` disagree about which of their layers have one."""
    if config.get("use_sliding_window"):
        raise options.refused("use_sliding_window", True, "allowed: false")
    return {}


_NO_WINDOWS = Mixed(
    theirs=tuple(sorted(options.WINDOW_OPTIONS)),
    read=_read_no_windows,
    write=lambda model: {"use_sliding_window": False},
)
_QWEN_NAMES = (
    *(*_NUM_EXPERTS, "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", *_LOSSES),
)

_GRANITE_NAMES = ("num_local_experts", "num_experts_per_tok", "shared_intermediate_size")

MOE_FAMILIES = (
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        options=(*SHAPE, rms_eps(1e-5), HEAD_DIM, tied(False), gate()),
        mixed=(
            Mixed(
                theirs=("num_local_experts", "num_experts_per_tok", *_LOSSES),
                read=_read_mixtral,
                write=_write_mixtral,
            ),
        ),
        constants={"router_jitter_noise": 0.0},
        fixed={**RMS, **UNBIASED},
        rules=mixtral_rules,
        rope_theta=1_000_000.0,
        windows="all",
    ),
    Family(
        name="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        options=(
            *(*SHAPE, RMS_EPS, HEAD_DIM, ATTENTION_BIAS, tied(False), gate(), *GRANITE_SCALES),
        ),
        mixed=(
            Mixed(
                theirs=(*_GRANITE_NAMES, *_LOSSES),
                read=_read_granite,
                write=_write_granite,
            ),
        ),
        fixed={**RMS, "mlp_bias": False},
        rules=granite_moe_rules,
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        options=(
            *(*SHAPE, RMS_EPS, tied(False), gate()),
            Option(theirs="qkv_bias", ours="qkv_bias", missing=True),
        ),
        mixed=(
            Mixed(
                theirs=(*_QWEN_NAMES, "shared_expert_intermediate_size"),
                read=partial(_read_qwen, number=60, per_token=4, shared=5632),
                write=partial(_write_qwen, has_shared=True),
            ),
            _NO_WINDOWS,
        ),
        fixed={**RMS, **UNBIASED},
        rules=qwen_moe_rules,
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        options=(*SHAPE, RMS_EPS, HEAD_DIM, ATTENTION_BIAS, tied(False), gate()),
        mixed=(
            Mixed(
                theirs=_QWEN_NAMES,
                read=partial(_read_qwen, number=128, per_token=8, shared=0),
                write=partial(_write_qwen, has_shared=False),
            ),
            _NO_WINDOWS,
        ),
        fixed={**RMS, "mlp_bias": False, "qk_norm": "head"},
        rules=qwen_moe_rules,
    ),
)
