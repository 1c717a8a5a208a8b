"""What a `config.json` says, in fields of our model section, and back.

An option is either read, or known not to change what is computed, or refused by its name:
a model is never taken for another one that is nearly the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from checkpoint.hf.errors import UnsupportedModelError
from outlast.model import ModelSpec

Config = Mapping[str, Any]
Fields = dict[str, Any]

GATED_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu"}
PLAIN_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# Whether both branches read the same stream.
BLOCKS = {True: "parallel", False: "serial"}
# What is not set is not there, but for these.
_TRUE_IF_MISSING = frozenset({"is_causal"})
# They say how a model is used, or from where it comes.
IGNORED = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("model_type", "pretraining_tp", "return_dict", "task_specific_params", "torch_dtype"),
        *("transformers_version", "use_cache", "problem_type", "chunk_size_feed_forward"),
        *("classifier_dropout", "tokenizer_class", "gradient_checkpointing", "_num_labels"),
        *("cache_implementation", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "_from_model_config", "max_sequence_length"),
        # Of programs besides `transformers`.
        *("is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of theirs and the field of ours; `missing` is what theirs is if not given."""

    theirs: str
    ours: str
    missing: Any
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Options of theirs that together are fields of ours."""

    theirs: tuple[str, ...]
    read: Callable[[Config], Fields]
    write: Callable[[ModelSpec], Fields]


def choice(theirs: str, ours: str, missing: str, values: Mapping[str, str]) -> Option:
    """An option with names for values, of which we have some."""

    def read(value: Any) -> str:
        if value not in values:
            raise refused(theirs, value, f"allowed: {', '.join(values)}")
        return values[value]

    def write(value: Any) -> str:
        named = [theirs_value for theirs_value, ours_value in values.items() if ours_value == value]
        if not named:
            raise UnsupportedModelError(f"model.{ours} = {value} has no name in {theirs}")
        return named[0]

    return Option(theirs=theirs, ours=ours, missing=missing, read=read, write=write)


def refused(option: str, value: Any, why: str = "the trainer does not have it") -> Exception:
    """The error for an option that we lack."""
    return UnsupportedModelError(f"config.json: {option} = {value!r} cannot be taken over; {why}")


def required(config: Config, name: str) -> Any:
    """An option of which there is no default."""
    if config.get(name) is None:
        raise UnsupportedModelError(f"config.json has no {name}")
    return config[name]


@contextmanager
def understood(config: Config, names: Iterable[str]) -> Iterator[None]:
    """Refuse some options by name where one has a value that it cannot have.

    What reads an option expects the type that it has in `transformers`.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        given = ", ".join(f"{name} = {config[name]!r}" for name in names if name in config)
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UnsupportedModelError(
            f"config.json: {given or 'an option'} cannot be understood: {missing}"
        ) from error


def check_all_read(config: Config, read: set[str], family: str) -> None:
    """Refuse what is set and neither read nor known to change nothing."""
    for name, value in config.items():
        if name in read or name in IGNORED or value is None:
            continue
        if value is False and name not in _TRUE_IF_MISSING:
            continue
        if name.startswith(("output_", "summary_", "is_encoder_decoder")):
            continue
        raise refused(name, value, f"it is not known of {family}")


# ---- rotary positions

_SCALING_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"},
}
ROPE_OPTIONS = frozenset(
    {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
    | {"max_position_embeddings", "original_max_position_embeddings"}
    # As GPT-NeoX once had them.
    | {"rotary_pct", "rotary_emb_base"}
)


def read_rope(config: Config, *, theta: float, fraction: float) -> Fields:
    """The fields of rotary positions, and the length of a sequence.

    `theta` and `fraction` are what both are where the config does not say it.
    """
    seq_len = required(config, "max_position_embeddings")
    newer, older = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if newer and older and newer != older:
        # `transformers` passes one of them over.
        raise refused("rope_scaling", older, "rope_parameters says something else")
    given = dict(newer or older)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    older_theta = _first(config, "rope_theta", "rotary_emb_base")
    older_fraction = _first(config, "partial_rotary_factor", "rotary_pct")
    theta = _given(given.pop("rope_theta", None), older_theta, theta)
    fraction = _given(given.pop("partial_rotary_factor", None), older_fraction, fraction)
    original = given.pop("original_max_position_embeddings", None) or config.get(
        "original_max_position_embeddings"
    )
    if kind not in _SCALING_KEYS:
        raise refused("rope_type", kind, f"allowed: {', '.join(_SCALING_KEYS)}")
    for name, value in given.items():
        is_default = value is None or (name, value) == ("truncate", True)
        if name not in _SCALING_KEYS[kind] and not is_default:
            raise refused(f"rope_parameters.{name}", value)
    fields: Fields = {
        "positions": "rope",
        "rope_theta": float(theta),
        "rope_fraction": float(fraction),
        "seq_len": seq_len,
    }
    if kind != "default":
        scaling = {"kind": kind, **_scaling(kind, given)}
        if kind != "linear":
            # The dynamic one counts from the length that the config says.
            scaling["original_seq_len"] = seq_len if kind == "dynamic" else original or seq_len
        fields["rope_scaling"] = scaling
    return fields


def read_ropes(config: Config, *, theta: float, local_theta: float) -> Fields:
    """The same where layers with a window have parameters of their own."""
    given = config.get("rope_parameters") or {}
    unknown = [name for name in given if name not in _KINDS]
    if unknown:
        raise refused(f"rope_parameters.{unknown[0]}", given[unknown[0]], "it is of no layer")
    of_all, of_local = (dict(given.get(name) or {}) for name in ("full_attention", _LOCAL))
    of_all |= config.get("rope_scaling") or {}
    fields = read_rope({**config, "rope_parameters": of_all}, theta=theta, fraction=1.0)
    of_local["rope_theta"] = _given(of_local.get("rope_theta"), local_theta)
    local = read_rope(
        {"rope_parameters": of_local, "max_position_embeddings": fields["seq_len"]},
        theta=local_theta,
        fraction=1.0,
    )
    if local == fields:
        return fields
    if "rope_scaling" in local:
        kind = local["rope_scaling"]["kind"]
        why = "allowed: default, or all that full_attention has"
        raise refused(f"rope_parameters.{_LOCAL}.rope_type", kind, why)
    if local["rope_fraction"] != fields["rope_fraction"]:
        raise refused("partial_rotary_factor", local["rope_fraction"], "allowed: one for all")
    return {**fields, "rope_local_theta": local["rope_theta"]}


def _first(config: Config, *names: str) -> Any:
    """The first of some options that is given."""
    return _given(*(config.get(name) for name in names))


def _given(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def _scaling(kind: str, given: Mapping[str, Any]) -> Fields:
    found = {name: value for name, value in given.items() if value is not None}
    if kind == "yarn":
        scales = found.pop("mscale", None), found.pop("mscale_all_dim", None)
        if "attention_factor" not in found and all(scales):
            over, under = (0.1 * scale * math.log(found["factor"]) + 1.0 for scale in scales)
            found["attention_factor"] = over / under
    return {name: value for name, value in found.items() if name != "truncate"}


def write_rope(model: ModelSpec) -> Fields:
    """The same as `transformers` has it."""
    scaling = model.rope_scaling
    parameters: Fields = {"rope_theta": model.rope_theta, "rope_type": "default"}
    if model.rope_fraction != 1.0:
        parameters["partial_rotary_factor"] = model.rope_fraction
    if scaling.kind != "none":
        given = scaling.model_dump()
        keys = _SCALING_KEYS[scaling.kind] & set(given)
        parameters["rope_type"] = scaling.kind
        parameters |= {key: given[key] for key in sorted(keys) if given[key] is not None}
    if scaling.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = scaling.original_seq_len
    longest = model.seq_len
    if scaling.kind == "dynamic" and scaling.original_seq_len is not None:
        longest = scaling.original_seq_len
    return {"rope_parameters": parameters, "max_position_embeddings": longest}


def write_ropes(model: ModelSpec) -> Fields:
    """The same where layers with a window have parameters of their own."""
    written = write_rope(model)
    of_all = written["rope_parameters"]
    of_local = of_all
    if model.rope_local_theta is not None:
        of_local = {"rope_theta": model.rope_local_theta, "rope_type": "default"}
        if model.rope_fraction != 1.0:
            of_local["partial_rotary_factor"] = model.rope_fraction
    return {**written, "rope_parameters": {"full_attention": of_all, _LOCAL: of_local}}


# ---- windows

WINDOW_OPTIONS = frozenset(
    {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    | {"sliding_window_pattern", "_sliding_window_pattern"}
)
# Of which layers one sees everything, where the config has no `layer_types`.
_WINDOW_PATTERNS = {"gemma2": 2, "cohere2": 4, "gemma3_text": 6, "olmo3": 4}
_LOCAL = "sliding_attention"
_KINDS = {_LOCAL: "local", "full_attention": "global"}


def read_window(config: Config, *, missing: int | None, used: bool, first: int) -> Fields:
    """The fields of windows; `layer_types` counts before the older options.

    `missing` is the window, `used` whether there is one, and `first` the layer from which on,
    where the config does not say it.
    """
    if missing is not None:
        # One that is longer than all sequences hides nothing.
        missing = min(missing, required(config, "max_position_embeddings"))
    window = config.get("sliding_window", missing)
    if window is None or not config.get("use_sliding_window", used):
        return {}
    layers = required(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None and config.get("model_type") in _WINDOW_PATTERNS:
        every = config.get("sliding_window_pattern") or _WINDOW_PATTERNS[config["model_type"]]
        types = [list(_KINDS)[(layer + 1) % every == 0] for layer in range(layers)]
    if types is None:
        first = config.get("max_window_layers", first)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    unknown = [each for each in types if each not in _KINDS]
    if unknown:
        raise refused("layer_types", unknown[0], f"allowed: {', '.join(_KINDS)}")
    kinds = [_KINDS[each] for each in types]
    if "local" not in kinds:
        return {}
    return {"window": window, "window_pattern": shortest(kinds)}


def shortest(kinds: list[str]) -> list[str]:
    """What `kinds` is made of, again and again."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


def write_window(model: ModelSpec, *, by_layer: bool) -> Fields:
    """The same as `transformers` has it: by layer, or one window for all."""
    if not by_layer:
        return {"sliding_window": model.window}
    if model.window is None:
        # Without a list some families have windows all the same.
        return {"use_sliding_window": False, "layer_types": ["full_attention"] * model.layers}
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    pattern = model.window_pattern
    types = [names[pattern[layer % len(pattern)]] for layer in range(model.layers)]
    return {"sliding_window": model.window, "use_sliding_window": True, "layer_types": types}
