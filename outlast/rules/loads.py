"""Whether a saved model is the one that a spec describes, from the shapes of its tensors.

What decides the size of a model is compared, by field; of which kind its norms and biases are is
not. A rank compares every tensor when it loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from outlast.problems import shown

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# Name of a tensor to its type and its shape over all ranks.
SavedTensors = Mapping[str, tuple[str, tuple[int, ...]]]

_EXPERTS = ".mlp.experts.up"
_BLOCK = re.compile(r"model\.blocks\.(\d+)\.")


def wrong_with_model(url: str, step: int, saved: SavedTensors, spec: JobSpec) -> str | None:
    """Why the job cannot begin with the checkpoint of `step` at `url`; None if it fits."""
    other = [
        f"{field} = {held}, and this job has {wanted}"
        for field, held, wanted in _sizes(saved, spec)
        if held != wanted
    ]
    if not other:
        return None
    return (
        f"is {shown(url)}, whose checkpoint of step {step} is of another model: it has "
        f"{'; '.join(other)}; load it with the model and precision that saved it"
    )


def _sizes(saved: SavedTensors, spec: JobSpec) -> Iterator[tuple[str, object, object]]:
    """Field, what is saved and what the spec has, of fields that follow from shapes."""
    model = spec.model
    shapes = {name: shape for name, (_, shape) in saved.items()}
    blocks = [int(found[1]) for name in shapes if (found := _BLOCK.match(name))]
    tokens = shapes.get("model.tokens.weight", ())
    if not blocks or len(tokens) != 2:
        # Not a checkpoint of this trainer's models; who loads it will say what it is.
        return
    yield "model.layers", max(blocks) + 1, model.layers
    padded = "" if model.vocab_multiple == 1 else " (padded by model.vocab_multiple)"
    yield f"model.vocab_size{padded}", tokens[0], model.vocab_rows
    yield "model.hidden", tokens[1], model.hidden
    if len(down := shapes.get("model.blocks.0.mlp.down.weight", ())) == 2:
        yield "model.ffn_hidden", down[1], model.mlp_hidden
    experts = next((shapes[each] for each in sorted(shapes) if each.endswith(_EXPERTS)), ())
    yield "model.moe.num_experts", experts[0] if experts else 0, model.moe.num_experts
    if len(experts) == 4 and model.moe.num_experts:
        yield "model.moe.ffn_hidden", experts[2], model.expert_hidden
    if len(qkv := shapes.get("model.blocks.0.attention.qkv.weight", ())) == 2:
        # Keys and values share what queries leave.
        width = model.width_of_head
        if tokens[1] == model.hidden:
            kv_heads = (qkv[0] - model.heads * width) // (2 * width)
            yield "model.kv_heads", kv_heads, model.num_kv_heads
    positions = shapes.get("model.positions.weight")
    is_learned = model.positions == "learned"
    if positions is None or not is_learned:
        yield "model.positions", _kind(positions is not None), _kind(is_learned)
    else:
        yield "model.seq_len", positions[0], model.seq_len
    is_tied = "model.head.weight" not in shapes
    yield "model.tied_embeddings", str(is_tied).lower(), str(model.tied_embeddings).lower()
    is_double = saved["model.tokens.weight"][0] == "float64"
    if is_double != (spec.precision == "fp64"):
        yield "precision", "fp64" if is_double else "another than fp64", spec.precision


def _kind(is_learned: bool) -> str:
    return "learned" if is_learned else "others than learned"
