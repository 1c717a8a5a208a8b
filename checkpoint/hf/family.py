"""What there is to say of one architecture of `transformers`, and options that many share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoint.hf import options
from checkpoint.hf.options import Fields, Mixed, Option, choice
from checkpoint.hf.rules import Rule
from outlast.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropouts:
    """Options for dropout of branches and of embeddings, which are one field of ours."""

    of_stream: str
    of_embeddings: str
    missing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRope:
    """That layers with a window turn by a base of their own."""

    missing: float
    """What it is where a config does not say it."""
    older: str | None = None
    """An option that older configs say it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of `transformers`."""

    name: str
    architecture: str
    """The class that exported models are of."""
    other_architectures: tuple[str, ...] = ()
    """Classes whose models are taken over, too, besides the one without a head."""
    options: tuple[Option, ...]
    fixed: Mapping[str, Any]
    """Fields that all its models have."""
    rules: Callable[[ModelSpec], Iterator[Rule]]
    prefix: str = "model."
    """Of all names but the head's; a model that was saved without a head lacks it."""
    tables: tuple[str, str] = ("model.embed_tokens.weight", "lm_head.weight")
    """The tables of the input and of the output, of which one may be a copy."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be there besides, each the same as another."""
    unused: tuple[str, ...] = ()
    """Beginnings of names of what belongs to other heads, which a model is without."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """Ends of names, and what they are in older files."""
    rotary: bool = True
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0
    """Both where a config does not say them."""
    local_rope: LocalRope | None = None
    windows: Literal["none", "all", "by_layer"] = "none"
    window: int | None = None
    uses_window: bool = True
    """Both where a config does not say them: a window, and whether it is used."""
    first_window: int = 0
    """The first layer with one, likewise."""
    longest: int | None = None
    """The length of a sequence where a config does not say it."""
    ignored: tuple[str, ...] = ()
    """Options that published models have, and that nothing reads."""
    mixed: tuple[Mixed, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Options with which it would be another model, and what they must be."""
    dropouts: Dropouts | None = None
    derived: Callable[[Fields], Fields] = field(default=lambda fields: {})
    """Fields that follow from others."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes whose models are taken over. That of another head is another model."""
        bases = [
            f"{self.architecture.removesuffix(head)}Model"
            for head in _CAUSAL_HEADS
            if self.architecture.endswith(head)
        ]
        return (self.architecture, *self.other_architectures, *bases)


# Without one of these, models go on with a text as well: their table is that of the head, too,
# or files have the head's.
_CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
HEAD_DIM = Option(theirs="head_dim", ours="head_width", missing=None)
LAYER_EPS = Option(theirs="layer_norm_eps", ours="norm_eps", missing=1e-5)
ATTENTION_BIAS = Option(theirs="attention_bias", ours="attention_bias", missing=False)
MLP_BIAS = Option(theirs="mlp_bias", ours="mlp_bias", missing=False)
VOCABULARY = Option(theirs="vocab_size", ours="vocab_size", missing=32000)
INIT = Option(theirs="initializer_range", ours="init_std", missing=0.02)
SHAPE = (
    Option(theirs="num_hidden_layers", ours="layers", missing=32),
    Option(theirs="hidden_size", ours="hidden", missing=4096),
    Option(theirs="num_attention_heads", ours="heads", missing=32),
    Option(theirs="num_key_value_heads", ours="kv_heads", missing=None),
    Option(theirs="intermediate_size", ours="ffn_hidden", missing=11008),
    VOCABULARY,
    INIT,
    Option(theirs="attention_dropout", ours="attention_dropout", missing=0.0),
)
# As GPT-2 has named them.
GPT_SHAPE = (
    Option(theirs="n_layer", ours="layers", missing=12),
    Option(theirs="n_embd", ours="hidden", missing=768),
    Option(theirs="n_head", ours="heads", missing=12),
    Option(theirs="n_inner", ours="ffn_hidden", missing=None),
    Option(theirs="n_positions", ours="seq_len", missing=1024),
    VOCABULARY,
    INIT,
    Option(theirs="layer_norm_epsilon", ours="norm_eps", missing=1e-5),
)
# Factors of Granite's models, of which one divides.
GRANITE_SCALES = (
    Option(theirs="embedding_multiplier", ours="embedding_scale", missing=1.0),
    Option(theirs="residual_multiplier", ours="residual_scale", missing=1.0),
    Option(theirs="attention_multiplier", ours="attention_scale", missing=1.0),
    Option(
        theirs="logits_scaling",
        ours="logit_scale",
        missing=1.0,
        read=lambda divisor: 1.0 / divisor,
        write=lambda scale: 1.0 / scale,
    ),
)
RMS = {"norm": "rmsnorm"}
UNBIASED = {"attention_bias": False, "mlp_bias": False}


def rms_eps(missing: float) -> Option:
    return Option(theirs="rms_norm_eps", ours="norm_eps", missing=missing)


RMS_EPS = rms_eps(1e-6)


def tied(missing: bool) -> Option:
    return Option(theirs="tie_word_embeddings", ours="tied_embeddings", missing=missing)


def gate(missing: str = "silu", name: str = "hidden_act") -> Option:
    return choice(name, "activation", missing, options.GATED_ACTIVATIONS)


def plain(missing: str, name: str = "hidden_act") -> Option:
    return choice(name, "activation", missing, options.PLAIN_ACTIVATIONS)
