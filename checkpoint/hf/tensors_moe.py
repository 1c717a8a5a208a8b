"""The rules of families with experts: theirs are a tensor each, ours one for all of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkpoint.hf.rules import Rule, copied
from checkpoint.hf.tensors import llama_rules
from outlast.model import ModelSpec


def mixtral_rules(model: ModelSpec) -> Iterator[Rule]:
    """Mixtral: Llama with experts, whose three matrices have numbers."""
    yield from _moe_rules(model, "block_sparse_moe", ("w1", "w3", "w2"))


def qwen_moe_rules(model: ModelSpec) -> Iterator[Rule]:
    """Qwen 2 and 3 with experts, and MLPs in some layers."""
    yield from _moe_rules(model, "mlp", ("gate_proj", "up_proj", "down_proj"))


def granite_moe_rules(model: ModelSpec) -> Iterator[Rule]:
    """Granite with experts, all of a layer in one tensor, and one that all tokens go through."""
    yield from _but_experts(model, [True] * model.layers)
    number, units = model.moe.num_experts, model.moe.shared_ffn_hidden
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}"
        experts, shared = f"{theirs}.block_sparse_moe", f"{theirs}.shared_mlp"
        yield copied(f"{ours}.router.weight", f"{experts}.router.layer.weight", number)
        yield Rule(
            ours=f"{ours}.experts.up",
            theirs=(f"{experts}.input_linear.weight",),
            rows=(number,),
            pieces=(number,),
            inner_planes=2,
        )
        yield copied(f"{ours}.experts.down", f"{experts}.output_linear.weight", number)
        if units:
            yield Rule(
                ours=f"{ours}.shared.up",
                theirs=(f"{shared}.input_linear.weight",),
                rows=(2 * units,),
                pieces=(units, units),
                joined="planes",
            )
            yield copied(f"{ours}.shared.down", f"{shared}.output_linear.weight", model.hidden)


def _moe_rules(model: ModelSpec, place: str, names: tuple[str, str, str]) -> Iterator[Rule]:
    """`names` are those of an expert's gate, input and output."""
    pattern = model.moe.pattern
    has_experts = [pattern[layer % len(pattern)] == "experts" for layer in range(model.layers)]
    yield from _but_experts(model, has_experts)
    for layer in (layer for layer, has in enumerate(has_experts) if has):
        ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.{place}"
        yield copied(f"{ours}.router.weight", f"{theirs}.gate.weight", model.moe.num_experts)
        yield from _experts(model, f"{ours}.experts", f"{theirs}.experts", names)
        if model.moe.shared_ffn_hidden:
            yield from _shared(model, f"{ours}.shared", theirs)


def _but_experts(model: ModelSpec, has_experts: Sequence[bool]) -> Iterator[Rule]:
    """Llama's rules without those of MLPs where a layer has experts."""
    for rule in llama_rules(model):
        parts = rule.ours.split(".")
        if parts[0] != "blocks" or parts[2] != "mlp" or not has_experts[int(parts[1])]:
            yield rule


def _experts(
    model: ModelSpec, ours: str, theirs: str, names: tuple[str, str, str]
) -> Iterator[Rule]:
    number, (gate, up, down) = model.moe.num_experts, names
    inputs = (model.expert_hidden,) * (2 * number)
    yield Rule(
        ours=f"{ours}.up",
        theirs=tuple(
            f"{theirs}.{expert}.{name}.weight" for expert in range(number) for name in (gate, up)
        ),
        rows=inputs,
        pieces=inputs,
        joined="planes",
        stacked=number,
    )
    outputs = (model.hidden,) * number
    yield Rule(
        ours=f"{ours}.down",
        theirs=tuple(f"{theirs}.{expert}.{down}.weight" for expert in range(number)),
        rows=outputs,
        pieces=outputs,
        joined="planes",
    )


def _shared(model: ModelSpec, ours: str, theirs: str) -> Iterator[Rule]:
    units, name = model.moe.shared_ffn_hidden, f"{theirs}.shared_expert"
    yield Rule(
        ours=f"{ours}.up",
        theirs=(f"{name}.gate_proj.weight", f"{name}.up_proj.weight"),
        rows=(units, units),
        pieces=(units, units),
        joined="planes",
    )
    yield copied(f"{ours}.down", f"{name}.down_proj.weight", model.hidden)
    if model.moe.shared_gate:
        yield copied(f"{ours}.gate", f"{theirs}.shared_expert_gate.weight", 1)
