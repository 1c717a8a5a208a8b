"""A `config.json` as the model section of a spec, and a model as a `config.json`.

`section_of` reads a `config.json`; `config_of` writes one, and refuses a model that would be
read back as another.
"""

from __future__ import annotations

from typing import Any

from checkpoint.hf import options
from checkpoint.hf.errors import UnsupportedModelError
from checkpoint.hf.families import FAMILIES, LACKING
from checkpoint.hf.family import Family
from checkpoint.hf.options import Config, Fields
from checkpoint.hf.rules import Rule
from outlast.model import ModelSpec
from outlast.rules.sizes import LARGEST

_LONGEST = "max_position_embeddings"
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
    _check_architectures(config, family)
    config = _without_constants(config, family)
    fields: Fields = dict(family.fixed)
    for option in family.options:
        with options.understood(config, (option.theirs,)):
            fields[option.ours] = option.read(config.get(option.theirs, option.missing))
    _check_layers(fields)
    for mixed in family.mixed:
        with options.understood(config, mixed.theirs):
            fields |= mixed.read(config)
    if family.rotary:
        with options.understood(config, sorted(options.ROPE_OPTIONS)):
            fields |= _rope_of(config, family)
    if family.windows != "none":
        with options.understood(config, sorted(options.WINDOW_OPTIONS)):
            fields |= options.read_window(
                config,
                missing=family.window,
                used=family.uses_window,
                first=family.first_window,
            )
        if "window" not in fields:
            fields.pop("rope_local_theta", None)
    with options.understood(config, ()):
        fields |= family.derived(fields)
    options.check_all_read(config, options_of(family) | set(family.ignored), family.name)
    return fields


def options_of(family: Family) -> set[str]:
    """Options that say which model of a family it is."""
    names = {option.theirs for option in family.options}
    names |= {name for mixed in family.mixed for name in mixed.theirs}
    if family.dropouts is not None:
        names.add(family.dropouts.of_embeddings)
    if family.rotary:
        names |= options.ROPE_OPTIONS
        if family.local_rope is not None and family.local_rope.older is not None:
            names.add(family.local_rope.older)
    return names | options.WINDOW_OPTIONS if family.windows != "none" else names


def _check_architectures(config: Config, family: Family) -> None:
    """Refuse a model of another class, as one with another head; a config need not name any."""
    given = config.get("architectures") or ()
    allowed = {name.lower() for name in family.architectures}
    # MPT's own code is of "MPT", and the same in `transformers` of "Mpt".
    if not isinstance(given, (list, tuple)) or {str(name).lower() for name in given} - allowed:
        why = f"allowed for {family.name}: {', '.join(family.architectures)}"
        raise options.refused("architectures", given, why)


def _check_layers(fields: Fields) -> None:
    """What is said of each layer takes memory for each."""
    layers, most = fields.get("layers", 1), LARGEST["model.layers"]
    if type(layers) is not int or not 1 <= layers <= most:
        raise UnsupportedModelError(f"config.json has {layers!r} layers; allowed: 1 to {most}")


def _rope_of(config: Config, family: Family) -> Fields:
    theta, fraction, local = family.rope_theta, family.rope_fraction, family.local_rope
    if local is None:
        return options.read_rope(config, theta=theta, fraction=fraction)
    older = None if local.older is None else config.get(local.older)
    return options.read_ropes(config, theta=theta, local_theta=older or local.missing)


def config_of(model: ModelSpec, family: Family) -> Fields:
    """A `config.json` of a family that says what our model is.

    Raises:
        UnsupportedModelError: the family has no such model.
    """
    config: Fields = {"model_type": family.name, "architectures": [family.architecture]}
    for option in family.options:
        value = _value(model, option.ours)
        config[option.theirs] = option.write(value)
    for mixed in family.mixed:
        config |= mixed.write(model)
    if family.dropouts is not None:
        config[family.dropouts.of_embeddings] = config[family.dropouts.of_stream]
    if family.rotary:
        by_layer = family.local_rope is not None
        config |= options.write_ropes(model) if by_layer else options.write_rope(model)
    if family.windows != "none":
        config |= options.write_window(model, by_layer=family.windows == "by_layer")
    check_says(config, model, family)
    return config


def config_like(given: Config, model: ModelSpec) -> tuple[Family, Fields]:
    """The same with what else another config of the family says, such as ids of special tokens.

    It may have been trained on shorter sequences than it can read.

    Raises:
        UnsupportedModelError: the family has no such model.
    """
    family = family_of(given)
    written = config_of(model, family)
    # Older names for the same would count beside the newer ones.
    others = {name: value for name, value in given.items() if name not in options_of(family)}
    config = {**others, **written}
    longest = given.get(_LONGEST)
    if family.rotary and isinstance(longest, int) and model.rope_scaling.kind != "dynamic":
        config[_LONGEST] = max(longest, written[_LONGEST])
    check_says(config, model, family)
    return family, config


def check_says(config: Config, model: ModelSpec, family: Family) -> None:
    """Refuse a config that would be read back as another model."""
    other = compared(ModelSpec.model_validate(section_of(config)))
    for name, value in compared(model).items():
        may_be_longer = name == "seq_len" and family.rotary
        if other[name] != value and not (may_be_longer and other[name] >= value):
            raise UnsupportedModelError(
                f"{family.architecture} has no model with model.{name} = {value}, only "
                f"{other[name]}"
            )


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


def _value(model: ModelSpec, name: str) -> Any:
    """A field, or what it is if it is not given."""
    if name == "attention_scale" and model.attention_scale is None:
        return model.width_of_head**-0.5
    if name == "rope_local_theta" and model.rope_scaling.kind == "none":
        return model.rope_local_theta or model.rope_theta
    if name == "moe":
        return _experts(model)
    return getattr(model, _DERIVED.get(name, name))


def _experts(model: ModelSpec) -> Fields:
    """What decides the experts; the router's losses are the trainer's own."""
    moe = model.moe
    if moe.num_experts == 0:
        return {}
    losses = {"router_aux_loss_coef", "router_aux_loss_over", "router_z_loss_coef"}
    kinds = [moe.pattern[layer % len(moe.pattern)] for layer in range(model.layers)]
    found = moe.model_dump(exclude=losses)
    return found | {"ffn_hidden": model.expert_hidden, "pattern": kinds}


def _without_constants(config: Config, family: Family) -> Fields:
    left = dict(config)
    if family.longest is not None and left.get(_LONGEST) is None:
        left[_LONGEST] = family.longest
    for name, value in family.constants.items():
        given = left.pop(name, value)
        if given is not None and given != value:
            raise options.refused(name, given, f"allowed: {value}")
    dropouts = family.dropouts
    if dropouts is not None:
        # Both are ours in one field.
        allowed = left.get(dropouts.of_stream, dropouts.missing)
        given = left.pop(dropouts.of_embeddings, allowed)
        if given != allowed:
            why = f"allowed: {dropouts.of_stream} = {allowed}"
            raise options.refused(dropouts.of_embeddings, given, why)
    return left
