"""The rules of families with Llama's names: their tensors by their names and ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from checkpoint.hf.rules import Rule, copied
from outlast.model import ModelSpec

_NORMS_BEFORE = (".attention_norm.weight", ".mlp_norm.weight")


def llama_rules(model: ModelSpec) -> Iterator[Rule]:
    """Llama, and what has its names: projections apart, a gate beside the MLP's input."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from norm(model, "norm", "model.norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from norm(model, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attn")
        yield from norm(model, f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        yield from _gated_mlp(model, f"{ours}.mlp", f"{theirs}.mlp")


def _attention(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    """Queries, keys and values apart."""
    rows = qkv_rows(model)
    for part in ("weight", "bias") if model.has_qkv_bias else ("weight",):
        yield Rule(
            ours=f"{ours}.qkv.{part}",
            theirs=tuple(f"{theirs}.{name}_proj.{part}" for name in "qkv"),
            rows=rows,
            pieces=rows,
            joined="groups",
            groups=model.num_kv_heads,
        )
    if model.qk_norm != "none":
        width = model.width_of_head
        heads = (model.heads, model.num_kv_heads) if model.qk_norm == "all" else (1, 1)
        yield copied(f"{ours}.head_norm.query", f"{theirs}.q_norm.weight", heads[0] * width)
        yield copied(f"{ours}.head_norm.key", f"{theirs}.k_norm.weight", heads[1] * width)
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
    yield from _norms_behind(model)


def olmo2_rules(model: ModelSpec) -> Iterator[Rule]:
    """OLMo 2: Llama with norms behind each branch instead of before it."""
    yield from (rule for rule in llama_rules(model) if not rule.ours.endswith(_NORMS_BEFORE))
    yield from _norms_behind(model)


def _norms_behind(model: ModelSpec) -> Iterator[Rule]:
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from norm(model, f"{ours}.attention.out.norm", f"{theirs}.post_attention_layernorm")
        yield from norm(model, f"{ours}.mlp.down.norm", f"{theirs}.post_feedforward_layernorm")


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
    yield from _ungated_rules(model, "c_fc", "c_proj")


def nemotron_rules(model: ModelSpec) -> Iterator[Rule]:
    """Nemotron: Llama's names, of which there is no gate."""
    yield from _ungated_rules(model, "up_proj", "down_proj")


def _ungated_rules(model: ModelSpec, up: str, down: str) -> Iterator[Rule]:
    """`up` and `down` are the names of the MLP's matrices."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from norm(model, "norm", "model.norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from norm(model, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attn")
        yield from norm(model, f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        for part in ("weight", "bias") if model.mlp_bias else ("weight",):
            yield copied(f"{ours}.mlp.up.{part}", f"{theirs}.mlp.{up}.{part}", model.mlp_hidden)
            yield copied(f"{ours}.mlp.down.{part}", f"{theirs}.mlp.{down}.{part}", model.hidden)


def phi_rules(model: ModelSpec) -> Iterator[Rule]:
    """Phi: a parallel block with one norm, and biases everywhere."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from norm(model, "norm", "model.final_layernorm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
        yield table(model, "head.bias", "lm_head.bias")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from norm(model, f"{ours}.input.norm", f"{theirs}.input_layernorm")
        qkv = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        yield from fused_input(model, f"{ours}.input", qkv, (f"{theirs}.mlp.fc1",))
        yield from branches(
            model, f"{ours}.output", f"{theirs}.self_attn.dense", f"{theirs}.mlp.fc2"
        )


def cohere_rules(model: ModelSpec) -> Iterator[Rule]:
    """Cohere: a parallel block with a gate and one norm."""
    yield table(model, "tokens.weight", "model.embed_tokens.weight")
    yield from norm(model, "norm", "model.norm")
    if not model.tied_embeddings:
        yield table(model, "head.weight", "lm_head.weight")
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield from norm(model, f"{ours}.input.norm", f"{theirs}.input_layernorm")
        yield from fused_input(
            model,
            f"{ours}.input",
            tuple(f"{attention}.{name}_proj" for name in "qkv"),
            (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        )
        yield from branches(model, f"{ours}.output", f"{attention}.o_proj", f"{mlp}.down_proj")


def stablelm_rules(model: ModelSpec) -> Iterator[Rule]:
    """StableLM has both kinds of block."""
    yield from (cohere_rules if model.block == "parallel" else llama_rules)(model)


def glm_rules(model: ModelSpec) -> Iterator[Rule]:
    """GLM: Llama with one tensor for gate and input."""
    for rule in llama_rules(model):
        if rule.ours.endswith("mlp.up.weight"):
            fused = rule.theirs[0].replace("gate_proj", "gate_up_proj")
            yield replace(rule, theirs=(fused,), rows=(sum(rule.pieces),))
        else:
            yield rule


def glm4_rules(model: ModelSpec) -> Iterator[Rule]:
    """GLM 4: a norm behind each branch as well."""
    yield from glm_rules(model)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield from norm(model, f"{ours}.attention.out.norm", f"{theirs}.post_self_attn_layernorm")
        yield from norm(model, f"{ours}.mlp.down.norm", f"{theirs}.post_mlp_layernorm")


def fused_input(
    model: ModelSpec, ours: str, qkv: tuple[str, ...], mlp: tuple[str, ...]
) -> Iterator[Rule]:
    """The one projection into a parallel block, with its biases; `mlp` has a gate first."""
    rows = qkv_rows(model)
    inputs = (*rows, *(model.mlp_hidden for _ in mlp))
    yield Rule(
        ours=f"{ours}.weight",
        theirs=tuple(f"{name}.weight" for name in (*qkv, *mlp)),
        rows=inputs,
        pieces=inputs,
        joined="groups",
        groups=model.num_kv_heads,
    )
    if model.has_qkv_bias:
        yield Rule(
            ours=f"{ours}.attention_bias",
            theirs=tuple(f"{name}.bias" for name in qkv),
            rows=rows,
            pieces=rows,
            joined="groups",
            groups=model.num_kv_heads,
        )
    if model.mlp_bias:
        yield copied(f"{ours}.bias", f"{mlp[-1]}.bias", model.mlp_hidden)


def qkv_rows(model: ModelSpec) -> tuple[int, int, int]:
    """Rows of queries, keys and values."""
    queries, keys = model.heads * model.width_of_head, model.num_kv_heads * model.width_of_head
    return queries, keys, keys


def branches(model: ModelSpec, ours: str, attention: str, mlp: str) -> Iterator[Rule]:
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
    if model.mlp_bias:
        yield copied(f"{ours}.bias", f"{mlp}.bias", model.hidden)
    elif model.attention_bias:
        yield copied(f"{ours}.bias", f"{attention}.bias", model.hidden)
    if model.block_biases == 2:
        yield copied(f"{ours}.attention_bias", f"{attention}.bias", model.hidden)


def norm(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
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
