"""The architectures of `transformers` that are models of ours.

A family has options that are fields of ours, fields that all its models have, and rules for
its tensors. What reads them is in `sections.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoint.hf import options
from checkpoint.hf.options import Fields, Option, choice
from checkpoint.hf.rules import Rule
from checkpoint.hf.tensors import (
    gemma2_rules,
    gpt2_rules,
    llama_rules,
    neox_rules,
    phi3_rules,
    phi_rules,
    starcoder2_rules,
)
from outlast.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of `transformers`."""

    name: str
    architecture: str
    options: tuple[Option, ...]
    fixed: Mapping[str, Any]
    rules: Callable[[ModelSpec], Iterator[Rule]]
    prefix: str = "model."
    """Of all names but the head's; a model that was saved without a head lacks it."""
    tables: tuple[str, str] = ("model.embed_tokens.weight", "lm_head.weight")
    """The tables of the input and of the output, of which one may be a copy."""
    rotary: bool = True
    windows: Literal["none", "all", "by_layer"] = "none"
    derived: Callable[[Fields], Fields] = field(default=lambda fields: {})
    """Fields that follow from others."""


_SHAPE = (
    Option(theirs="num_hidden_layers", ours="layers", missing=32),
    Option(theirs="hidden_size", ours="hidden", missing=4096),
    Option(theirs="num_attention_heads", ours="heads", missing=32),
    Option(theirs="num_key_value_heads", ours="kv_heads", missing=None),
    Option(theirs="intermediate_size", ours="ffn_hidden", missing=11008),
    Option(theirs="vocab_size", ours="vocab_size", missing=32000),
    Option(theirs="initializer_range", ours="init_std", missing=0.02),
    Option(theirs="attention_dropout", ours="attention_dropout", missing=0.0),
)
_RMS_EPS = Option(theirs="rms_norm_eps", ours="norm_eps", missing=1e-6)
_HEAD_DIM = Option(theirs="head_dim", ours="head_width", missing=None)
_ATTENTION_BIAS = Option(theirs="attention_bias", ours="attention_bias", missing=False)
_MLP_BIAS = Option(theirs="mlp_bias", ours="mlp_bias", missing=False)


def _tied(missing: bool) -> Option:
    return Option(theirs="tie_word_embeddings", ours="tied_embeddings", missing=missing)


def _gate(missing: str = "silu") -> Option:
    return choice("hidden_act", "activation", missing, options.GATED_ACTIVATIONS)


_RMS = {"norm": "rmsnorm"}
_UNBIASED = {"attention_bias": False, "mlp_bias": False}
_LLAMA = (*_SHAPE, _RMS_EPS, _HEAD_DIM, _ATTENTION_BIAS, _tied(False), _gate())
_QWEN = (*_SHAPE, _RMS_EPS, _tied(False), _gate())


_LAYER_EPS = Option(theirs="layer_norm_eps", ours="norm_eps", missing=1e-5)
_PARALLEL = {True: "parallel", False: "serial"}


def _inverse(value: float) -> float:
    return 1.0 / value


def _phi3_scaling(fields: Fields) -> Fields:
    """`transformers` takes Phi-3's yarn for longrope, which is another."""
    kind = fields.get("rope_scaling", {}).get("kind")
    if kind is not None:
        raise options.refused("rope_type", kind, "allowed: default")
    return {}


def _neox_branches(fields: Fields) -> Fields:
    """A parallel block has two norms, and a bias for each branch that has one."""
    if fields["block"] == "serial":
        return {}
    return {"block_norms": 2, "block_biases": 2 if fields["attention_bias"] else 1}


_FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        options=(*_LLAMA, _MLP_BIAS),
        fixed=_RMS,
        rules=llama_rules,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        options=(*_SHAPE, _RMS_EPS, _HEAD_DIM, _tied(False), _gate()),
        fixed={**_RMS, **_UNBIASED},
        rules=llama_rules,
        windows="all",
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        options=_QWEN,
        fixed={**_RMS, **_UNBIASED, "qkv_bias": True},
        rules=llama_rules,
        windows="by_layer",
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        options=(
            *_QWEN,
            _ATTENTION_BIAS,
            Option(theirs="head_dim", ours="head_width", missing=128),
        ),
        fixed={**_RMS, "mlp_bias": False, "qk_norm": "head"},
        rules=llama_rules,
        windows="by_layer",
    ),
    Family(
        name="gemma",
        architecture="GemmaForCausalLM",
        options=(
            *(*_SHAPE, _RMS_EPS, _ATTENTION_BIAS, _tied(True), _gate("gelu_pytorch_tanh")),
            Option(theirs="head_dim", ours="head_width", missing=256),
        ),
        fixed={**_RMS, "mlp_bias": False, "norm_weight": "one_plus"},
        rules=llama_rules,
        derived=lambda fields: {"embedding_scale": fields["hidden"] ** 0.5},
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        options=(
            *(*_SHAPE, _RMS_EPS, _ATTENTION_BIAS, _tied(True)),
            choice(
                "hidden_activation", "activation", "gelu_pytorch_tanh", options.GATED_ACTIVATIONS
            ),
            Option(theirs="head_dim", ours="head_width", missing=256),
            Option(
                theirs="query_pre_attn_scalar",
                ours="attention_scale",
                missing=256,
                read=lambda scalar: scalar**-0.5,
                write=lambda scale: round(scale**-2),
            ),
            Option(theirs="attn_logit_softcapping", ours="attention_softcap", missing=50.0),
            Option(theirs="final_logit_softcapping", ours="logit_softcap", missing=30.0),
        ),
        fixed={**_RMS, "mlp_bias": False, "norm_weight": "one_plus", "norm_place": "both"},
        rules=gemma2_rules,
        windows="by_layer",
        derived=lambda fields: {"embedding_scale": fields["hidden"] ** 0.5},
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        options=(
            *(*_SHAPE, _RMS_EPS, _ATTENTION_BIAS, _MLP_BIAS, _tied(True), _gate()),
            Option(
                theirs="no_rope_layers",
                ours="rope_pattern",
                missing=None,
                read=lambda kinds: options.shortest([("none", "rope")[kind] for kind in kinds]),
                write=lambda kinds: [int(kind == "rope") for kind in kinds],
            ),
        ),
        fixed=_RMS,
        rules=llama_rules,
        windows="by_layer",
    ),
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        options=(
            *(*_LLAMA, _MLP_BIAS),
            Option(theirs="embedding_multiplier", ours="embedding_scale", missing=1.0),
            Option(theirs="residual_multiplier", ours="residual_scale", missing=1.0),
            Option(theirs="attention_multiplier", ours="attention_scale", missing=1.0),
            Option(
                theirs="logits_scaling",
                ours="logit_scale",
                missing=1.0,
                read=_inverse,
                write=_inverse,
            ),
        ),
        fixed=_RMS,
        rules=llama_rules,
    ),
    Family(
        name="olmo",
        architecture="OlmoForCausalLM",
        options=(*_SHAPE, _ATTENTION_BIAS, _tied(False), _gate()),
        # `OlmoLayerNorm` has no parameters, and its epsilon is no option.
        fixed={"norm_weight": "none", "norm_eps": 1e-5, "mlp_bias": False},
        rules=llama_rules,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        options=(
            *(*_SHAPE, _RMS_EPS, _tied(False), _gate()),
            Option(theirs="resid_pdrop", ours="dropout", missing=0.0),
        ),
        fixed={**_RMS, **_UNBIASED},
        rules=phi3_rules,
        windows="all",
        derived=_phi3_scaling,
    ),
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        options=(
            *(*_SHAPE, _tied(True)),
            Option(theirs="norm_epsilon", ours="norm_eps", missing=1e-5),
            Option(theirs="use_bias", ours="attention_bias", missing=True),
            Option(theirs="residual_dropout", ours="dropout", missing=0.0),
            choice("hidden_act", "activation", "gelu_pytorch_tanh", options.PLAIN_ACTIVATIONS),
        ),
        fixed={},
        rules=starcoder2_rules,
        windows="all",
        derived=lambda fields: {"mlp_bias": fields["attention_bias"]},
    ),
    Family(
        name="phi",
        architecture="PhiForCausalLM",
        options=(
            *(*_SHAPE, _LAYER_EPS, _tied(False)),
            Option(theirs="resid_pdrop", ours="dropout", missing=0.0),
            choice("hidden_act", "activation", "gelu_new", options.PLAIN_ACTIVATIONS),
        ),
        fixed={"block": "parallel", "block_biases": 2, "head_bias": True},
        rules=phi_rules,
    ),
    Family(
        name="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        options=(
            *(each for each in _SHAPE if each.ours != "kv_heads"),
            *(_LAYER_EPS, _tied(False)),
            Option(theirs="attention_bias", ours="attention_bias", missing=True),
            Option(theirs="hidden_dropout", ours="dropout", missing=0.0),
            Option(
                theirs="use_parallel_residual",
                ours="block",
                missing=True,
                read=_PARALLEL.__getitem__,
                write=lambda block: block == "parallel",
            ),
            choice("hidden_act", "activation", "gelu", options.PLAIN_ACTIVATIONS),
        ),
        fixed={},
        rules=neox_rules,
        prefix="gpt_neox.",
        tables=("gpt_neox.embed_in.weight", "embed_out.weight"),
        derived=_neox_branches,
    ),
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        options=(
            Option(theirs="n_layer", ours="layers", missing=12),
            Option(theirs="n_embd", ours="hidden", missing=768),
            Option(theirs="n_head", ours="heads", missing=12),
            Option(theirs="n_inner", ours="ffn_hidden", missing=None),
            Option(theirs="n_positions", ours="seq_len", missing=1024),
            Option(theirs="vocab_size", ours="vocab_size", missing=50257),
            Option(theirs="layer_norm_epsilon", ours="norm_eps", missing=1e-5),
            Option(theirs="initializer_range", ours="init_std", missing=0.02),
            Option(theirs="resid_pdrop", ours="dropout", missing=0.1),
            Option(theirs="attn_pdrop", ours="attention_dropout", missing=0.1),
            _tied(True),
            choice("activation_function", "activation", "gelu_new", options.PLAIN_ACTIVATIONS),
        ),
        fixed={},
        rules=gpt2_rules,
        prefix="transformer.",
        tables=("transformer.wte.weight", "lm_head.weight"),
        rotary=False,
    ),
)
# Well-known architectures that are refused, and what of them we lack or have not mapped.
LACKING: Mapping[str, str] = {
    "bert": "attention in both directions",
    "bloom": "ALiBi",
    "cohere2": "layers without positions beside rotary ones",
    "deepseek_v3": "mixture of experts and latent attention",
    "falcon": "names of tensors that are not mapped yet",
    "gemma3_text": "norms after attention and MLP, and rotary positions of two kinds",
    "glm4": "norms after attention and MLP",
    "gpt_bigcode": "names of tensors that are not mapped yet",
    "gpt_oss": "mixture of experts and attention sinks",
    "gptj": "names of tensors that are not mapped yet",
    "llama4_text": "mixture of experts and layers without positions",
    "mixtral": "mixture of experts",
    "mpt": "ALiBi",
    "olmo2": "norms after attention and MLP",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
    "qwen3_next": "mixture of experts and linear attention",
    "stablelm": "names of tensors that are not mapped yet",
    "t5": "an encoder",
}
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}
