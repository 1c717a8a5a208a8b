"""The rules of families with names of their own: their tensors by their names and ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from checkpoint.hf.rules import Rule, copied
from checkpoint.hf.tensors import branches, fused_input, norm, qkv_rows, table
from outlast.model import ModelSpec

# Parts into which CodeGen's queries, keys and values are cut for its first tensor ranks.
_CODEGEN_PARTS = 4


def neox_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT-NeoX, which has queries, keys and values in our order: head by head."""
    yield table(model, "tokens.weight", "gpt_neox.embed_in.weight")
    yield from norm(model, "norm", "gpt_neox.final_layer_norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "embed_out.weight")
    is_parallel = model.block == "parallel"
    attention_bias = ("weight", "bias") if model.attention_bias else ("weight",)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"gpt_neox.layers.{layer}"
        inputs = f"{ours}.input" if is_parallel else ours
        yield from norm(model, f"{inputs}.attention_norm", f"{theirs}.input_layernorm")
        yield from norm(model, f"{inputs}.mlp_norm", f"{theirs}.post_attention_layernorm")
        qkv, up = ("qkv", "up") if is_parallel else ("attention.qkv", "mlp.up")
        attention, mlp = f"{theirs}.attention", f"{theirs}.mlp"
        for part in attention_bias:
            other = f"{attention}.query_key_value.{part}"
            yield copied(f"{inputs}.{qkv}.{part}", other, 3 * model.hidden)
        for part in ("weight", "bias"):
            yield copied(f"{inputs}.{up}.{part}", f"{mlp}.dense_h_to_4h.{part}", model.mlp_hidden)
        if is_parallel:
            yield from branches(
                model, f"{ours}.output", f"{attention}.dense", f"{mlp}.dense_4h_to_h"
            )
            continue
        for part in attention_bias:
            yield copied(f"{ours}.attention.out.{part}", f"{attention}.dense.{part}", model.hidden)
        for part in ("weight", "bias"):
            yield copied(f"{ours}.mlp.down.{part}", f"{mlp}.dense_4h_to_h.{part}", model.hidden)


def gpt2_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT-2, whose linear layers keep [in, out]."""
    hidden = model.hidden
    yield table(model, "tokens.weight", "transformer.wte.weight")
    yield copied("positions.weight", "transformer.wpe.weight", model.seq_len)
    yield from norm(model, "norm", "transformer.ln_f")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from norm(model, f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from norm(model, f"{ours}.mlp_norm", f"{theirs}.ln_2")
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


def gpt_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT: GPT-2 with norms of sums, and without a last one."""
    names = {
        "wte": "tokens_embed",
        "wpe": "positions_embed",
        "attention_norm": "attention.out.norm",
        "mlp_norm": "mlp.down.norm",
    }
    for rule in gpt2_rules(model):
        if rule.ours.startswith("norm."):
            continue
        ours, theirs = rule.ours, rule.theirs[0]
        for name, other in names.items():
            ours, theirs = ours.replace(name, other), theirs.replace(name, other)
        yield replace(rule, ours=ours, theirs=(theirs,))


def bigcode_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT-BigCode: GPT-2 with [out, in], and queries, keys and values in our order."""
    for rule in gpt2_rules(model):
        rows = sum(qkv_rows(model)) if ".attention.qkv." in rule.ours else rule.rows[0]
        yield rule if rule.padded_rows else copied(rule.ours, rule.theirs[0], rows)


def gptj_rules(model: ModelSpec) -> Iterator[Rule]:
    """GPT-J: a parallel block with one norm, whose attention has no biases."""
    yield from _gptj_ends(model)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from norm(model, f"{ours}.input.norm", f"{theirs}.ln_1")
        qkv = tuple(f"{theirs}.attn.{name}_proj" for name in "qkv")
        yield from fused_input(model, f"{ours}.input", qkv, (f"{theirs}.mlp.fc_in",))
        yield from branches(
            model, f"{ours}.output", f"{theirs}.attn.out_proj", f"{theirs}.mlp.fc_out"
        )


def codegen_rules(model: ModelSpec) -> Iterator[Rule]:
    """CodeGen: GPT-J with one tensor of parts that each have queries, values and keys."""
    yield from _gptj_ends(model)
    hidden, parts = model.hidden, range(_CODEGEN_PARTS)
    # Of queries, keys and values those of all parts.
    merged = tuple(tuple(3 * part + kind for part in parts) for kind in (0, 2, 1))
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from norm(model, f"{ours}.input.norm", f"{theirs}.ln_1")
        yield Rule(
            ours=f"{ours}.input.weight",
            theirs=(f"{theirs}.attn.qkv_proj.weight", f"{theirs}.mlp.fc_in.weight"),
            rows=(3 * hidden, model.mlp_hidden),
            pieces=(*(hidden // _CODEGEN_PARTS,) * 3 * _CODEGEN_PARTS, model.mlp_hidden),
            merged=(*merged, (3 * _CODEGEN_PARTS,)),
            joined="groups",
            groups=model.heads,
        )
        yield copied(f"{ours}.input.bias", f"{theirs}.mlp.fc_in.bias", model.mlp_hidden)
        yield from branches(
            model, f"{ours}.output", f"{theirs}.attn.out_proj", f"{theirs}.mlp.fc_out"
        )


def _gptj_ends(model: ModelSpec) -> Iterator[Rule]:
    yield table(model, "tokens.weight", "transformer.wte.weight")
    yield from norm(model, "norm", "transformer.ln_f")
    yield table(model, "head.weight", "lm_head.weight")
    yield table(model, "head.bias", "lm_head.bias")


def bloom_rules(model: ModelSpec) -> Iterator[Rule]:
    """BLOOM: Falcon's serial block, and a norm of the embeddings."""
    yield from norm(model, "embedding_norm", "transformer.word_embeddings_layernorm")
    yield from falcon_rules(model)


def mpt_rules(model: ModelSpec) -> Iterator[Rule]:
    """MPT, which has one tensor for queries, keys and values, all of a kind together."""
    hidden = model.hidden
    yield table(model, "tokens.weight", "transformer.wte.weight")
    yield from norm(model, "norm", "transformer.norm_f")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.blocks.{layer}"
        yield from norm(model, f"{ours}.attention_norm", f"{theirs}.norm_1")
        yield from norm(model, f"{ours}.mlp_norm", f"{theirs}.norm_2")
        yield Rule(
            ours=f"{ours}.attention.qkv.weight",
            theirs=(f"{theirs}.attn.Wqkv.weight",),
            rows=(3 * hidden,),
            pieces=(hidden, hidden, hidden),
            joined="groups",
            groups=model.heads,
        )
        for name, other, rows in (
            ("attention.out", "attn.out_proj", hidden),
            ("mlp.up", "ffn.up_proj", model.mlp_hidden),
            ("mlp.down", "ffn.down_proj", hidden),
        ):
            yield copied(f"{ours}.{name}.weight", f"{theirs}.{other}.weight", rows)


def falcon_rules(model: ModelSpec) -> Iterator[Rule]:
    """Falcon, which has queries, keys and values in our order: group by group."""
    yield table(model, "tokens.weight", "transformer.word_embeddings.weight")
    yield from norm(model, "norm", "transformer.ln_f")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        is_fused = model.block == "parallel" and model.block_norms == 1
        yield from (_falcon_fused if is_fused else _falcon_apart)(model, ours, theirs)
        attention, mlp = f"{theirs}.self_attention.dense", f"{theirs}.mlp.dense_4h_to_h"
        if model.block == "parallel":
            yield from branches(model, f"{ours}.output", attention, mlp)
            continue
        for part in _parts(model):
            yield copied(f"{ours}.attention.out.{part}", f"{attention}.{part}", model.hidden)
            yield copied(f"{ours}.mlp.down.{part}", f"{mlp}.{part}", model.hidden)


def _falcon_fused(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    """One norm and one projection for both branches."""
    qkv, up = f"{theirs}.self_attention.query_key_value", f"{theirs}.mlp.dense_h_to_4h"
    rows = (sum(qkv_rows(model)), model.mlp_hidden)
    yield from norm(model, f"{ours}.input.norm", f"{theirs}.input_layernorm")
    yield Rule(
        ours=f"{ours}.input.weight",
        theirs=(f"{qkv}.weight", f"{up}.weight"),
        rows=rows,
        pieces=rows,
        joined="groups",
        groups=model.num_kv_heads,
    )
    if model.attention_bias:
        yield copied(f"{ours}.input.attention_bias", f"{qkv}.bias", rows[0])
        yield copied(f"{ours}.input.bias", f"{up}.bias", rows[1])


def _falcon_apart(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    """A norm and a projection for each branch."""
    is_parallel = model.block == "parallel"
    inputs = f"{ours}.input" if is_parallel else ours
    norms = (
        ("ln_attn", "ln_mlp") if is_parallel else ("input_layernorm", "post_attention_layernorm")
    )
    for kind, name in zip(("attention_norm", "mlp_norm"), norms, strict=True):
        yield from norm(model, f"{inputs}.{kind}", f"{theirs}.{name}")
    qkv, up = ("qkv", "up") if is_parallel else ("attention.qkv", "mlp.up")
    for part in _parts(model):
        yield copied(
            f"{inputs}.{qkv}.{part}",
            f"{theirs}.self_attention.query_key_value.{part}",
            sum(qkv_rows(model)),
        )
        yield copied(
            f"{inputs}.{up}.{part}", f"{theirs}.mlp.dense_h_to_4h.{part}", model.mlp_hidden
        )


def _parts(model: ModelSpec) -> tuple[str, ...]:
    return ("weight", "bias") if model.attention_bias else ("weight",)
