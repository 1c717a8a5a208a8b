"""Families whose only positions are biases of attention: BLOOM and MPT."""

from __future__ import annotations

from typing import Any

from checkpoint.hf import options
from checkpoint.hf.family import INIT, UNBIASED, VOCABULARY, Family, tied
from checkpoint.hf.options import Config, Fields, Mixed, Option
from checkpoint.hf.tensors_gpt import bloom_rules, mpt_rules
from outlast.model import ModelSpec

_EPS = Option(theirs="layer_norm_epsilon", ours="norm_eps", missing=1e-5)


def _either(config: Config, *names: str, missing: Any) -> Any:
    """An option that configs have by one of some names."""
    return next((config[name] for name in names if config.get(name) is not None), missing)


def _one_of(config: Config, name: str, other: str, missing: Any) -> Any:
    """An option with two names, which say the same if both are given."""
    found = _either(config, name, other, missing=missing)
    if config.get(other, found) not in (None, found):
        raise options.refused(other, config[other], f"allowed: {found}, as {name} is")
    return found


def _read_bloom(config: Config) -> Fields:
    hidden = _either(config, "n_embed", "hidden_size", missing=64)
    inner = config.get("n_inner")
    if inner not in (None, 4 * hidden):
        # `transformers` takes no notice of it.
        raise options.refused("n_inner", inner, f"allowed: {4 * hidden}, 4 x hidden_size")
    return {
        "hidden": hidden,
        "heads": _one_of(config, "n_head", "num_attention_heads", 8),
        "layers": _one_of(config, "n_layer", "num_hidden_layers", 2),
        # It has no longest sequence; BLOOM was trained on this one.
        "seq_len": config.get("seq_length", 2048),
    }


def _write_bloom(model: ModelSpec) -> Fields:
    shape = {"hidden_size": model.hidden, "n_head": model.heads, "n_layer": model.layers}
    return {**shape, "seq_length": model.seq_len}


_BLOOM_SHAPE = Mixed(
    theirs=(
        *("hidden_size", "n_head", "n_layer", "seq_length", "n_inner"),
        # Older names of these, and how Megatron-DeepSpeed computed the same.
        *("n_embed", "num_attention_heads", "num_hidden_layers"),
        *("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion"),
        *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    ),
    read=_read_bloom,
    write=_write_bloom,
)
# What there is no other of in `transformers`, or what it takes no notice of.
_MPT_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_pdrop": 0,
    "attn_type": "multihead_attention",
}


def _read_mpt_attention(config: Config) -> Fields:
    given = dict(config.get("attn_config") or {})
    for name, value in _MPT_ATTENTION.items():
        found = given.pop(name, value)
        if found != value:
            raise options.refused(f"attn_config.{name}", found, f"allowed: {value}")
    scale = given.get("softmax_scale")
    options.check_all_read(given, {"softmax_scale", "attn_impl"}, "mpt's attn_config")
    return {"attention_scale": scale}


def _write_mpt_attention(model: ModelSpec) -> Fields:
    return {"attn_config": {**_MPT_ATTENTION, "softmax_scale": model.attention_scale}}


# Beside it names of the same norm, and what a folder is made with.
_MPT_ATTENTION_CONFIG = Mixed(
    theirs=("attn_config", "norm_type", "init_device", "init_config", "tokenizer_name", "verbose"),
    read=_read_mpt_attention,
    write=_write_mpt_attention,
)
ALIBI_FAMILIES = (
    Family(
        name="bloom",
        architecture="BloomForCausalLM",
        options=(
            *(VOCABULARY, INIT, _EPS, tied(True)),
            Option(theirs="attention_dropout", ours="attention_dropout", missing=0.0),
        ),
        mixed=(_BLOOM_SHAPE,),
        # Embeddings are never dropped.
        constants={"hidden_dropout": 0.0},
        fixed={"positions": "alibi", "embedding_norm": True},
        rules=bloom_rules,
        prefix="transformer.",
        tables=("transformer.word_embeddings.weight", "lm_head.weight"),
        rotary=False,
    ),
    Family(
        name="mpt",
        architecture="MptForCausalLM",
        options=(
            *(VOCABULARY, INIT, _EPS, tied(True)),
            Option(theirs="d_model", ours="hidden", missing=2048),
            Option(theirs="n_heads", ours="heads", missing=16),
            Option(theirs="n_layers", ours="layers", missing=24),
            Option(theirs="max_seq_len", ours="seq_len", missing=2048),
        ),
        mixed=(_MPT_ATTENTION_CONFIG,),
        # `transformers` takes no notice of any of them.
        constants={
            "expansion_ratio": 4,
            "no_bias": True,
            "learned_pos_emb": True,
            "embedding_fraction": 1.0,
            "logit_scale": None,
            "resid_pdrop": 0.0,
            "emb_pdrop": 0.0,
        },
        fixed={
            **UNBIASED,
            "positions": "alibi",
            "norm_bias": False,
            "activation": "gelu",
        },
        rules=mpt_rules,
        prefix="transformer.",
        tables=("transformer.wte.weight", "lm_head.weight"),
        rotary=False,
    ),
)
