"""The rules of each family: its tensors by their names and ours."""

# D model width, M MLP units, Q rows of queries, K rows of keys.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from checkpoint.hf.rules import Rule, copied
from outlast.model import ModelSpec


def llama_rules(model: ModelSpec) -> Iterator[Rule]:
    """Llama, and what has its names: projections apart, a gate beside the MLP's input."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from _norm(model, "norm", "model.norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from _norm(model, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attn")
        yield from _norm(model, f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        yield from _gated_mlp(model, f"{ours}.mlp", f"{theirs}.mlp")


def _attention(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    """Queries, keys and values apart."""
    queries, keys = model.heads * model.width_of_head, model.num_kv_heads * model.width_of_head
    rows = (queries, keys, keys)
    for part in ("weight", "bias") if model.has_qkv_bias else ("weight",):
        yield Rule(
            ours=f"{ours}.qkv.{part}",
            theirs=tuple(f"{theirs}.{name}_proj.{part}" for name in "qkv"),
            rows=rows,
            pieces=rows,
            joined="groups",
            groups=model.num_kv_heads,
        )
    if model.qk_norm == "head":
        width = model.width_of_head
        yield copied(f"{ours}.head_norm.query", f"{theirs}.q_norm.weight", width)
        yield copied(f"{ours}.head_norm.key", f"{theirs}.k_norm.weight", width)
    for part in ("weight", "bias") if model.attention_bias else ("weight",):
        yield copied(f"{ours}.out.{part}", f"{theirs}.o_proj.{part}", model.hidden)


def _gated_mlp(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    units = model.mlp_hidden
    yield Rule(
        ours=f"{ours}.up.weight",
        theirs=(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
        rows=(units, units),
        pieces=(units, units),
        joined="planes",
    )
    yield copied(f"{ours}.down.weight", f"{theirs}.down_proj.weight", model.hidden)
    if model.mlp_bias:
        yield copied(f"{ours}.up.gate_bias", f"{theirs}.gate_proj.bias", units)
        yield copied(f"{ours}.up.bias", f"{theirs}.up_proj.bias", units)
        yield copied(f"{ours}.down.bias", f"{theirs}.down_proj.bias", model.hidden)


def gemma2_rules(model: ModelSpec) -> Iterator[Rule]:
    """Gemma 2: Llama with a norm behind each branch as well, and other names for norms."""
    for rule in llama_rules(model):
        if rule.ours.endswith("mlp_norm.weight"):
            before = rule.theirs[0].replace("post_attention", "pre_feedforward")
            yield replace(rule, theirs=(before,))
        else:
            yield rule
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from _norm(model, f"{ours}.attention.out.norm", f"{theirs}.post_attention_layernorm")
        yield from _norm(model, f"{ours}.mlp.down.norm", f"{theirs}.post_feedforward_layernorm")


def phi3_rules(model: ModelSpec) -> Iterator[Rule]:
    """Phi-3: Llama with one tensor for queries, keys and values, and one for gate and input."""
    for rule in llama_rules(model):
        if rule.ours.endswith("attention.qkv.weight"):
            fused = rule.theirs[0].replace("q_proj", "qkv_proj")
            yield replace(rule, theirs=(fused,), rows=(sum(rule.pieces),))
        elif rule.ours.endswith("mlp.up.weight"):
            fused = rule.theirs[0].replace("gate_proj", "gate_up_proj")
            yield replace(rule, theirs=(fused,), rows=(sum(rule.pieces),))
        else:
            yield rule


def starcoder2_rules(model: ModelSpec) -> Iterator[Rule]:
    """StarCoder 2: Llama's names around an MLP without a gate."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from _norm(model, "norm", "model.norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from _norm(model, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attn")
        yield from _norm(model, f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        for part in ("weight", "bias") if model.mlp_bias else ("weight",):
            yield copied(f"{ours}.mlp.up.{part}", f"{theirs}.mlp.c_fc.{part}", model.mlp_hidden)
            yield copied(f"{ours}.mlp.down.{part}", f"{theirs}.mlp.c_proj.{part}", model.hidden)


def phi_rules(model: ModelSpec) -> Iterator[Rule]:
    """Phi: a parallel block with one norm, and biases everywhere."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from _norm(model, "norm", "model.final_layernorm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
        yield table(model, "head.bias", "lm_head.bias")
    queries, keys = model.heads * model.width_of_head, model.num_kv_heads * model.width_of_head
    qkv = (queries, keys, keys)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from _norm(model, f"{ours}.input.norm", f"{theirs}.input_layernorm")
        projections = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        for name, inputs, rows in (
            (
                "weight",
                (*(f"{each}.weight" for each in projections), f"{theirs}.mlp.fc1.weight"),
                (*qkv, model.mlp_hidden),
            ),
            (
                "attention_bias",
                tuple(f"{each}.bias" for each in projections),
                (queries, keys, keys),
            ),
        ):
            yield Rule(
                ours=f"{ours}.input.{name}",
                theirs=inputs,
                rows=rows,
                pieces=rows,
                joined="groups",
                groups=model.num_kv_heads,
            )
        yield copied(f"{ours}.input.bias", f"{theirs}.mlp.fc1.bias", model.mlp_hidden)
        yield from _branches(
            model, f"{ours}.output", f"{theirs}.self_attn.dense", f"{theirs}.mlp.fc2"
        )


def neox_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT-NeoX, which has queries, keys and values in our order: head by head."""
    yield table(model, "tokens.weight", "gpt_neox.embed_in.weight")
    yield from _norm(model, "norm", "gpt_neox.final_layer_norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "embed_out.weight")
    is_parallel = model.block == "parallel"
    attention_bias = ("weight", "bias") if model.attention_bias else ("weight",)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"gpt_neox.layers.{layer}"
        inputs = f"{ours}.input" if is_parallel else ours
        yield from _norm(model, f"{inputs}.attention_norm", f"{theirs}.input_layernorm")
        yield from _norm(model, f"{inputs}.mlp_norm", f"{theirs}.post_attention_layernorm")
        qkv, up = ("qkv", "up") if is_parallel else ("attention.qkv", "mlp.up")
        attention, mlp = f"{theirs}.attention", f"{theirs}.mlp"
        for part in attention_bias:
            other = f"{attention}.query_key_value.{part}"
            yield copied(f"{inputs}.{qkv}.{part}", other, 3 * model.hidden)
        for part in ("weight", "bias"):
            yield copied(f"{inputs}.{up}.{part}", f"{mlp}.dense_h_to_4h.{part}", model.mlp_hidden)
        if is_parallel:
            yield from _branches(
                model, f"{ours}.output", f"{attention}.dense", f"{mlp}.dense_4h_to_h"
            )
            continue
        for part in attention_bias:
            yield copied(f"{ours}.attention.out.{part}", f"{attention}.dense.{part}", model.hidden)
        for part in ("weight", "bias"):
            yield copied(f"{ours}.mlp.down.{part}", f"{mlp}.dense_4h_to_h.{part}", model.hidden)


def _branches(model: ModelSpec, ours: str, attention: str, mlp: str) -> Iterator[Rule]:
    """What a parallel block adds to the stream: columns of both branches, and their biases."""
    columns = (model.heads * model.width_of_head, model.mlp_hidden)
    yield Rule(
        ours=f"{ours}.weight",
        theirs=(f"{attention}.weight", f"{mlp}.weight"),
        rows=columns,
        pieces=columns,
        joined="groups",
        groups=model.num_kv_heads,
        columns=True,
    )
    yield copied(f"{ours}.bias", f"{mlp}.bias", model.hidden)
    if model.block_biases == 2:
        yield copied(f"{ours}.attention_bias", f"{attention}.bias", model.hidden)


def gpt2_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT-2, whose linear layers keep [in, out]."""
    hidden = model.hidden
    yield table(model, "tokens.weight", "transformer.wte.weight")
    yield copied("positions.weight", "transformer.wpe.weight", model.seq_len)
    yield from _norm(model, "norm", "transformer.ln_f")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _norm(model, f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _norm(model, f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for part in ("weight", "bias"):
            is_matrix = part == "weight"
            yield Rule(
                ours=f"{ours}.attention.qkv.{part}",
                theirs=(f"{theirs}.attn.c_attn.{part}",),
                rows=(3 * hidden,),
                pieces=(hidden, hidden, hidden),
                joined="groups",
                groups=model.heads,
                transposed=is_matrix,
            )
            for name, other, rows in (
                ("attention.out", "attn.c_proj", hidden),
                ("mlp.up", "mlp.c_fc", model.mlp_hidden),
                ("mlp.down", "mlp.c_proj", hidden),
            ):
                yield copied(
                    f"{ours}.{name}.{part}", f"{theirs}.{other}.{part}", rows, transposed=is_matrix
                )


def _norm(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    for part in ("weight", "bias")[: model.norm_vectors]:
        yield copied(f"{ours}.{part}", f"{theirs}.{part}", model.hidden)


def table(model: ModelSpec, ours: str, theirs: str) -> Rule:
    """A table of the vocabulary, which ours may have padded."""
    rows = model.vocab_size
    return Rule(
        ours=ours,
        theirs=(theirs,),
        rows=(rows,),
        pieces=(rows,),
        padded_rows=model.vocab_rows if model.vocab_rows != rows else None,
    )
