"""Families whose tensors have names of their own."""

from __future__ import annotations

from checkpoint.hf import options
from checkpoint.hf.family import (
    GPT_SHAPE,
    LAYER_EPS,
    SHAPE,
    Dropouts,
    Family,
    plain,
    tied,
)
from checkpoint.hf.options import Config, Fields, Mixed, Option, choice
from checkpoint.hf.tensors_gpt import (
    bigcode_rules,
    codegen_rules,
    falcon_rules,
    gpt2_rules,
    gpt_rules,
    gptj_rules,
    neox_rules,
)
from outlast.model import ModelSpec

_GPT_DROPOUT = (
    Option(theirs="resid_pdrop", ours="dropout", missing=0.1),
    Option(theirs="attn_pdrop", ours="attention_dropout", missing=0.1),
)
_GPT_DROPOUTS = Dropouts(of_stream="resid_pdrop", of_embeddings="embd_pdrop", missing=0.1)


def _neox_branches(fields: Fields) -> Fields:
    """A parallel block has two norms, and a bias for each branch that has one."""
    if fields["block"] == "serial":
        return {}
    return {"block_norms": 2, "block_biases": 2 if fields["attention_bias"] else 1}


def _read_multi_query(config: Config) -> Fields:
    return {"kv_heads": 1 if config.get("multi_query", True) else None}


def _write_multi_query(model: ModelSpec) -> Fields:
    return {"multi_query": model.num_kv_heads == 1}


# `transformers` writes what follows from the first of them, too.
_MULTI_QUERY = Mixed(
    theirs=(
        "multi_query",
        "num_key_value_heads",
        # Of a type narrower than fp32: they say how it rounds.
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    ),
    read=_read_multi_query,
    write=_write_multi_query,
)


def _read_rotary_dim(config: Config) -> Fields:
    hidden, heads = options.required(config, "n_embd"), options.required(config, "n_head")
    turned, width = config.get("rotary_dim", 64), hidden // heads
    if not isinstance(turned, int) or not 0 < turned <= width:
        raise options.refused("rotary_dim", turned, f"allowed: 1 to {width}, the width of a head")
    return {"rope_fraction": turned / width}


def _write_rotary_dim(model: ModelSpec) -> Fields:
    return {"rotary_dim": round(model.rope_fraction * model.width_of_head)}


# A length beside the number of positions that changes nothing.
_N_CTX = Mixed(theirs=("n_ctx",), read=lambda config: {}, write=lambda model: {})
# CodeGen has a length beside the number of positions that changes nothing.
_ROTARY_DIM = Mixed(theirs=("rotary_dim", "n_ctx"), read=_read_rotary_dim, write=_write_rotary_dim)
_GPTJ = (
    *(*GPT_SHAPE, tied(False), plain("gelu_new", "activation_function")),
    Option(theirs="resid_pdrop", ours="dropout", missing=0.0),
    Option(theirs="attn_pdrop", ours="attention_dropout", missing=0.0),
)
_GPTJ_FIXED = {
    "block": "parallel",
    "positions": "rope",
    "rope_pairs": "neighbours",
    "attention_bias": False,
    "head_bias": True,
}


def _read_falcon_block(config: Config) -> Fields:
    """Which block it is, its norms, and its heads of keys and values."""
    heads = options.required(config, "num_attention_heads")
    if config.get("new_decoder_architecture", False):
        norms = config.get("num_ln_in_parallel_attn")
        kv_heads = config.get("num_kv_heads") or heads
        return {
            "block": "parallel",
            "block_norms": 2 if norms is None else norms,
            "kv_heads": kv_heads,
        }
    block = options.BLOCKS[config.get("parallel_attn", True)]
    return {"block": block, "kv_heads": 1 if config.get("multi_query", True) else heads}


def _write_falcon_block(model: ModelSpec) -> Fields:
    is_parallel, kv_heads = model.block == "parallel", model.num_kv_heads
    is_new = is_parallel and (model.block_norms == 2 or kv_heads not in (1, model.heads))
    return {
        "new_decoder_architecture": is_new,
        "parallel_attn": is_parallel,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": model.block_norms if is_new else None,
    }


_FALCON_BLOCK = Mixed(
    theirs=(
        *("new_decoder_architecture", "parallel_attn", "multi_query", "num_kv_heads"),
        "num_ln_in_parallel_attn",
    ),
    read=_read_falcon_block,
    write=_write_falcon_block,
)


def _falcon_biases(fields: Fields) -> Fields:
    biased = fields["attention_bias"]
    branches = {"block_biases": 2} if biased and fields["block"] == "parallel" else {}
    return {"mlp_bias": biased, **branches}


GPT_FAMILIES = (
    Family(
        name="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        options=(
            *(each for each in SHAPE if each.ours != "kv_heads"),
            *(LAYER_EPS, tied(False)),
            Option(theirs="attention_bias", ours="attention_bias", missing=True),
            Option(theirs="hidden_dropout", ours="dropout", missing=0.0),
            Option(
                theirs="use_parallel_residual",
                ours="block",
                missing=True,
                read=options.BLOCKS.__getitem__,
                write=lambda block: block == "parallel",
            ),
            plain("gelu"),
        ),
        fixed={},
        rope_fraction=0.25,
        longest=2048,
        rules=neox_rules,
        prefix="gpt_neox.",
        tables=("gpt_neox.embed_in.weight", "embed_out.weight"),
        derived=_neox_branches,
    ),
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        options=(*GPT_SHAPE, *_GPT_DROPOUT, tied(True), plain("gelu_new", "activation_function")),
        dropouts=_GPT_DROPOUTS,
        constants={"scale_attn_weights": True},
        ignored=("n_ctx", "n_special", "predict_special_tokens"),
        fixed={},
        rules=gpt2_rules,
        prefix="transformer.",
        tables=("transformer.wte.weight", "lm_head.weight"),
        rotary=False,
    ),
    Family(
        name="openai-gpt",
        architecture="OpenAIGPTLMHeadModel",
        options=(
            *(each for each in GPT_SHAPE if each.ours not in ("ffn_hidden", "seq_len")),
            Option(theirs="n_positions", ours="seq_len", missing=512),
            *(*_GPT_DROPOUT, tied(True)),
            # What is called gelu there is its approximation.
            choice("afn", "activation", "gelu", {"gelu": "gelu_tanh", "relu": "relu"}),
        ),
        mixed=(_N_CTX,),
        dropouts=_GPT_DROPOUTS,
        constants={"n_special": 0, "predict_special_tokens": True},
        fixed={"norm_place": "sum"},
        rules=gpt_rules,
        prefix="transformer.",
        tables=("transformer.tokens_embed.weight", "lm_head.weight"),
        rotary=False,
    ),
    Family(
        name="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        options=(
            *(*GPT_SHAPE, *_GPT_DROPOUT, tied(True)),
            plain("gelu_pytorch_tanh", "activation_function"),
        ),
        dropouts=_GPT_DROPOUTS,
        constants={"scale_attn_weights": True},
        # Of a server of its makers.
        ignored=(
            *("inference_runner", "max_batch_size", "pad_key_length"),
            *("pre_allocate_kv_cache", "validate_runner_input"),
        ),
        mixed=(_MULTI_QUERY,),
        fixed={},
        rules=bigcode_rules,
        prefix="transformer.",
        tables=("transformer.wte.weight", "lm_head.weight"),
        rotary=False,
    ),
    Family(
        name="gptj",
        architecture="GPTJForCausalLM",
        options=_GPTJ,
        dropouts=Dropouts(of_stream="resid_pdrop", of_embeddings="embd_pdrop"),
        constants={"rotary": True, "scale_attn_weights": True},
        mixed=(_ROTARY_DIM,),
        fixed=_GPTJ_FIXED,
        rules=gptj_rules,
        prefix="transformer.",
        tables=("transformer.wte.weight", "lm_head.weight"),
        rotary=False,
    ),
    Family(
        name="codegen",
        architecture="CodeGenForCausalLM",
        options=_GPTJ,
        dropouts=Dropouts(of_stream="resid_pdrop", of_embeddings="embd_pdrop"),
        constants={"rotary": True, "scale_attn_weights": True},
        mixed=(_ROTARY_DIM,),
        fixed=_GPTJ_FIXED,
        rules=codegen_rules,
        prefix="transformer.",
        tables=("transformer.wte.weight", "lm_head.weight"),
        rotary=False,
    ),
    Family(
        name="falcon",
        architecture="FalconForCausalLM",
        options=(
            *(each for each in SHAPE if each.ours not in ("kv_heads", "ffn_hidden")),
            Option(theirs="ffn_hidden_size", ours="ffn_hidden", missing=None),
            Option(theirs="layer_norm_epsilon", ours="norm_eps", missing=1e-5),
            Option(theirs="bias", ours="attention_bias", missing=False),
            *(tied(True), plain("gelu", "activation")),
        ),
        # Embeddings are never dropped.
        constants={"alibi": False, "hidden_dropout": 0.0},
        mixed=(_FALCON_BLOCK,),
        longest=2048,
        fixed={},
        rules=falcon_rules,
        prefix="transformer.",
        tables=("transformer.word_embeddings.weight", "lm_head.weight"),
        derived=_falcon_biases,
    ),
)
