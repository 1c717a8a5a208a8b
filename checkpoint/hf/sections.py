"""A `config.json` as the model section of a spec, and a model as a `config.json`.

`section_of` reads a `config.json`; `config_of` writes one, and refuses a model that would be
read back as another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint.hf import options
from checkpoint.hf.errors import UnsupportedModelError
from checkpoint.hf.families import FAMILIES, LACKING, Family
from checkpoint.hf.options import Config, Fields
from checkpoint.hf.rules import Rule
from outlast.model import ModelSpec

# What is the trainer's own, and what follows from others and is compared as such.
_NOT_COMPARED = {"preset", "vocab_multiple", "dropout", "attention_dropout", "init_std"}
_DERIVED = {
    "kv_heads": "num_kv_heads",
    "ffn_hidden": "mlp_hidden",
    "head_width": "width_of_head",
    "qkv_bias": "has_qkv_bias",
}


def family_of(config: Config) -> Family:
    """The family of a `config.json`.

    Raises:
        UnsupportedModelError: it is none of ours.
    """
    name = str(config.get("model_type"))
    if name in LACKING:
        raise UnsupportedModelError(
            f"config.json: model_type is {name!r}, which needs {LACKING[name]}; the trainer does "
            f"not have that. Known are: {', '.join(FAMILIES)}"
        )
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type is {name!r}; known are: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def section_of(config: Config) -> Fields:
    """The model section of a job's spec that is the model of a `config.json`.

    Raises:
        UnsupportedModelError: its architecture is unknown, or an option that we lack is set.
    """
    family = family_of(config)
    config = _without_constants(config, family)
    fields: Fields = dict(family.fixed)
    for option in family.options:
        fields[option.ours] = option.read(config.get(option.theirs, option.missing))
    read = {option.theirs for option in family.options}
    if family.rotary:
        fields |= options.read_rope(config)
        read |= options.ROPE_OPTIONS
    if family.windows != "none":
        fields |= options.read_window(config)
        read |= options.WINDOW_OPTIONS
    fields |= family.derived(fields)
    options.check_all_read(config, read, family.name)
    return fields


def config_of(model: ModelSpec, family: Family) -> Fields:
    """A `config.json` of a family that says what our model is.

    Raises:
        UnsupportedModelError: the family has no such model.
    """
    config: Fields = {"model_type": family.name, "architectures": [family.architecture]}
    for option in family.options:
        value = _value(model, option.ours)
        config[option.theirs] = option.write(value)
    if family.name in _TWO_DROPOUTS:
        of_stream, of_embeddings, _ = _TWO_DROPOUTS[family.name]
        config[of_embeddings] = config[of_stream]
    if "no_rope_layers" in config:
        kinds = config["no_rope_layers"]
        config["no_rope_layers"] = [kinds[layer % len(kinds)] for layer in range(model.layers)]
    if family.rotary:
        config |= options.write_rope(model)
    if family.windows != "none":
        config |= options.write_window(model, by_layer=family.windows == "by_layer")
    other = compared(ModelSpec.model_validate(section_of(config)))
    for name, value in compared(model).items():
        if other[name] != value:
            raise UnsupportedModelError(
                f"{family.architecture} has no model with model.{name} = {value}, only "
                f"{other[name]}"
            )
    return config


def rules_of(model: ModelSpec, family: Family) -> tuple[Rule, ...]:
    """What each tensor of a model becomes."""
    return tuple(family.rules(model))


def compared(model: ModelSpec) -> Fields:
    """What decides the model, by field: what follows from other fields if it is not given."""
    found = {}
    for name in ModelSpec.model_fields:
        if name not in _NOT_COMPARED:
            found[name] = _value(model, name)
    if model.positions == "rope" and model.rope_scaling.kind == "dynamic":
        del found["seq_len"]
    return found


# Families with dropout of branches and of embeddings, and what both are if not given.
_TWO_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", 0.1),
    "phi": ("resid_pdrop", "embd_pdrop", 0.0),
    "phi3": ("resid_pdrop", "embd_pdrop", 0.0),
    "starcoder2": ("residual_dropout", "embedding_dropout", 0.0),
}


def _value(model: ModelSpec, name: str) -> Any:
    """A field, or what it is if it is not given."""
    if name == "attention_scale" and model.attention_scale is None:
        return model.width_of_head**-0.5
    return getattr(model, _DERIVED.get(name, name))


# Options with which a family would be another model, and what they must be.
_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"scale_attn_weights": True},
}


def _without_constants(config: Config, family: Family) -> Fields:
    left = dict(config)
    for name, value in _CONSTANTS.get(family.name, {}).items():
        given = left.pop(name, value)
        if given != value:
            raise options.refused(name, given, f"allowed: {value}")
    if family.name == "smollm3":
        # A list counts before the interval that it is made of.
        interval, layers = left.pop("no_rope_layer_interval", 4), left["num_hidden_layers"]
        by_interval = [int((layer + 1) % interval != 0) for layer in range(layers)]
        left["no_rope_layers"] = left.get("no_rope_layers") or by_interval
    if family.name in _TWO_DROPOUTS:
        # Both are ours in one field.
        of_stream, of_embeddings, missing = _TWO_DROPOUTS[family.name]
        allowed = left.get(of_stream, missing)
        given = left.pop(of_embeddings, allowed)
        if given != allowed:
            raise options.refused(of_embeddings, given, f"allowed: {of_stream} = {allowed}")
    return left
