"""Rules of the model alone, whatever the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, changed, only_with
from outlast.rules.divides import Divides

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# Kinds of scaling that look at a field.
_SCALING_FIELDS = {
    "factor": ("linear", "dynamic", "yarn", "llama3"),
    "original_seq_len": ("dynamic", "yarn", "llama3"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
}
# Of a share with six decimals.
_FRACTION_ROUNDING = 1e-6


def _check_hidden(spec: JobSpec) -> list[FieldProblem]:
    model = spec.model
    if model.head_width is not None:
        return []
    return Divides(
        field="model.hidden", value=model.hidden, by_name="model.heads", by=model.heads
    ).problems()


def _check_heads(spec: JobSpec) -> list[FieldProblem]:
    model = spec.model
    return Divides(
        field="model.heads", value=model.heads, by_name="model.kv_heads", by=model.num_kv_heads
    ).problems()


def _check_fused(spec: JobSpec) -> list[FieldProblem]:
    """One fused projection is cut by group of heads: each group takes its share of the MLP."""
    model = spec.model
    if model.block != "parallel":
        return []
    return Divides(
        field="model.ffn_hidden",
        value=model.mlp_hidden,
        by_name="model.kv_heads",
        by=model.num_kv_heads,
    ).problems()


def _check_vocabulary(spec: JobSpec) -> list[FieldProblem]:
    # The ids of files are looked at where the files are.
    if spec.data.tokens is not None or spec.model.vocab_size >= 256:
        return []
    return [
        FieldProblem(
            field="model.vocab_size",
            message=f"is {spec.model.vocab_size}; the byte tokenizer needs 256 or more",
        )
    ]


def _check_rotation(spec: JobSpec) -> list[FieldProblem]:
    model = spec.model
    if model.positions != "rope":
        return [
            only_with(
                f"model.{name}",
                list(value) if isinstance(value, tuple) else value,
                "model.positions = rope",
                model.positions,
            )
            for name, value in changed(model).items()
            if name.startswith("rope_") and name != "rope_scaling"
        ]
    if model.head_width is None and model.hidden % model.heads:
        return []
    width = model.width_of_head
    rotated = width * model.rope_fraction
    # A share is written with a few digits: as floats 0.58 of 100 is not quite 58.
    whole = round(rotated)
    if whole >= 2 and whole % 2 == 0 and abs(rotated - whole) <= _FRACTION_ROUNDING * width:
        return []
    near = [pair for pair in (int(rotated) // 2 * 2, int(rotated) // 2 * 2 + 2) if pair >= 2]
    allowed = " or ".join(f"{pair / width:g}" for pair in near if pair <= width)
    return [
        FieldProblem(
            field="model.rope_fraction",
            message=f"is {model.rope_fraction:g}, which rotates {rotated:g} of a head's {width} "
            "values; values turn in pairs; allowed near it: "
            f"{allowed or 'none: heads of one value cannot turn, take fewer model.heads'}",
        )
    ]


def _check_rope_scaling(spec: JobSpec) -> list[FieldProblem]:
    model, given = spec.model, spec.model.rope_scaling
    field = "model.rope_scaling"
    if given.kind != "none" and model.positions != "rope":
        return [only_with(f"{field}.kind", given.kind, "model.positions = rope", model.positions)]
    problems = [
        only_with(f"{field}.{name}", value, f"{field}.kind = {' or '.join(kinds)}", given.kind)
        for name, kinds in _SCALING_FIELDS.items()
        if (value := changed(given).get(name)) is not None and given.kind not in kinds
    ]
    if given.original_seq_len is None and given.kind in _SCALING_FIELDS["original_seq_len"]:
        message = f"is required with {field}.kind = {given.kind}"
        problems.append(FieldProblem(field=f"{field}.original_seq_len", message=message))
    if given.kind == "llama3" and given.high_freq_factor <= given.low_freq_factor:
        problems.append(
            FieldProblem(
                field=f"{field}.high_freq_factor",
                message=f"is {given.high_freq_factor:g}; allowed: more than "
                f"{field}.low_freq_factor = {given.low_freq_factor:g}",
            )
        )
    if given.kind == "dynamic" and round(model.width_of_head * model.rope_fraction) < 4:
        message = "is dynamic, which needs 4 or more rotated values in a head"
        problems.append(FieldProblem(field=f"{field}.kind", message=message))
    return problems


def _check_window(spec: JobSpec) -> list[FieldProblem]:
    model = spec.model
    if model.window is None:
        if model.window_pattern == ("local",):
            return []
        given = list(model.window_pattern)
        return [only_with("model.window_pattern", given, "model.window", "without one")]
    if "local" in model.window_pattern:
        return []
    return [
        FieldProblem(
            field="model.window_pattern",
            message="has no local layer, so model.window does nothing; allowed: patterns "
            "with at least one local, or no model.window",
        )
    ]


def _check_options(spec: JobSpec) -> list[FieldProblem]:
    model = spec.model
    problems = []
    if model.block == "serial" and model.block_norms == 2:
        # A serial block always has a norm before each of its two branches.
        problems.append(only_with("model.block_norms", 2, "model.block = parallel", "serial"))
    if model.block == "parallel" and model.norm_place != "before":
        needed = "model.block = serial"
        problems.append(only_with("model.norm_place", model.norm_place, needed, "parallel"))
    if model.block_biases == 2:
        if model.block == "serial":
            problems.append(only_with("model.block_biases", 2, "model.block = parallel", "serial"))
        elif not (model.attention_bias and model.mlp_bias):
            needed = "model.attention_bias and model.mlp_bias"
            problems.append(only_with("model.block_biases", 2, needed, "without both"))
    if model.norm == "rmsnorm" and "norm_bias" in changed(model):
        needed = "model.norm = layernorm"
        problems.append(only_with("model.norm_bias", "false", needed, "rmsnorm, which has none"))
    if model.qk_norm == "all" and model.norm == "layernorm":
        problems.append(only_with("model.qk_norm", "all", "model.norm = rmsnorm", "layernorm"))
    if model.norm_weight == "none" and "norm_bias" in changed(model):
        needed = "a weight of norms (model.norm_weight)"
        problems.append(only_with("model.norm_bias", "false", needed, "without one"))
    if model.positions == "rope" and model.rope_local_theta is not None and model.window is None:
        given = model.rope_local_theta
        problems.append(only_with("model.rope_local_theta", given, "model.window", "without one"))
    if model.positions == "rope" and "rope" not in model.rope_pattern:
        problems.append(
            FieldProblem(
                field="model.rope_pattern",
                message="has no layer that rotates; allowed: patterns with at least one rope, or "
                "model.positions = none",
            )
        )
    if model.positions == "alibi" and model.attention_softcap is not None:
        given, needed = model.attention_softcap, "model.positions other than alibi"
        problems.append(only_with("model.attention_softcap", given, needed, "alibi"))
    return problems


def _check_experts(spec: JobSpec) -> list[FieldProblem]:
    model, moe = spec.model, spec.model.moe
    field = "model.moe"
    given = changed(moe)
    if not given:
        return []
    if moe.num_experts == 0:
        return [
            only_with(f"{field}.{name}", _listed(value), f"{field}.num_experts > 0", 0)
            for name, value in given.items()
        ]
    if model.block == "parallel":
        # Its one output projection serves both branches.
        needed = "model.block = serial"
        return [only_with(f"{field}.num_experts", moe.num_experts, needed, "parallel")]
    problems = []
    if moe.experts_per_token > moe.num_experts:
        problems.append(
            FieldProblem(
                field=f"{field}.experts_per_token",
                message=f"is {moe.experts_per_token}, more than {field}.num_experts = "
                f"{moe.num_experts}; allowed: 1 to {moe.num_experts}",
            )
        )
    if "experts" not in moe.pattern:
        problems.append(
            FieldProblem(
                field=f"{field}.pattern",
                message="has no layer with experts; allowed: patterns with at least one, or "
                f"{field}.num_experts = 0",
            )
        )
    if moe.shared_gate and not moe.shared_ffn_hidden:
        needed = f"{field}.shared_ffn_hidden > 0"
        problems.append(only_with(f"{field}.shared_gate", "true", needed, 0))
    if moe.router_aux_loss_over == "model" and not moe.router_aux_loss_coef:
        needed = f"{field}.router_aux_loss_coef > 0"
        problems.append(only_with(f"{field}.router_aux_loss_over", "model", needed, 0))
    if model.mlp_bias and "dense" not in moe.pattern:
        message = "is true, and experts have no biases; allowed: false"
        problems.append(FieldProblem(field="model.mlp_bias", message=message))
    return problems


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


RULES = (
    *(_check_hidden, _check_heads, _check_fused, _check_vocabulary),
    *(_check_rotation, _check_rope_scaling, _check_window, _check_options),
    _check_experts,
)
