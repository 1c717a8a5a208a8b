"""The rules of each family: its tensors by their names and ours."""

# D model width, M MLP units, Q rows of queries, K rows of keys.
from __future__ import annotations

from collections.abc import Iterator

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
