"""The part of a job's spec that says what is trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from outlast.flops import ModelShape
from outlast.presets import PRESETS, PresetName
from outlast.section import Section


class ModelSpec(Section):
    """A decoder-only transformer; the defaults are a GPT with learned positions."""

    preset: PresetName | None = Field(
        None,
        description="A published model, which all other fields are those of unless given; "
        "`outlast models` lists them.",
    )
    layers: int = Field(4, ge=1, description="Transformer blocks.")
    hidden: int = Field(128, ge=1, description="Width of the residual stream.")
    heads: int = Field(4, ge=1, description="Attention heads; must divide hidden.")
    kv_heads: int | None = Field(
        None, ge=1, description="Heads of keys and values (grouped queries); heads unless given."
    )
    ffn_hidden: int | None = Field(
        None, ge=1, description="Width of the MLP; 4 x hidden unless given."
    )
    vocab_size: int = Field(256, ge=2, description="Token ids; 256 for the byte tokenizer.")
    seq_len: int = Field(128, ge=1, description="Tokens in one sequence.")
    tied_embeddings: bool = Field(
        True, description="Use the token embedding as the output projection too."
    )
    block: Literal["serial", "parallel"] = Field(
        "serial",
        description="serial: the MLP reads what attention wrote. parallel: both read the same "
        "norm, y = x + attention(norm(x)) + mlp(norm(x)), and share one input projection and one "
        "reduction.",
    )
    block_norms: Literal[1, 2] = Field(
        1, description="Norms of a parallel block: one shared, or one for each branch."
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Kind of every norm.")
    norm_bias: bool = Field(True, description="A LayerNorm adds a bias too.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of every norm.")
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = Field(
        "gelu_tanh", description="Non-linearity of the MLP; swiglu has a gate beside its input."
    )
    positions: Literal["learned", "rope", "none"] = Field(
        "learned", description="How a token knows its place."
    )
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of a head's width that is rotated."
    )
    rope_pairs: Literal["halves", "neighbours"] = Field(
        "halves",
        description="Which values of a head turn together: i and i + width/2 (Llama), "
        "or 2i and 2i + 1 (GPT-J).",
    )
    window: int | None = Field(
        None, ge=1, description="Local layers attend to this many tokens, the own one included."
    )
    window_pattern: tuple[Literal["local", "global"], ...] = Field(
        ("local",),
        min_length=1,
        description="Kinds of layers with a window, repeated over the depth. Global layers attend "
        "to everything before them.",
    )
    attention_bias: bool = Field(True, description="Biases in the attention's linear layers.")
    mlp_bias: bool = Field(True, description="Biases in the MLP's linear layers.")
    head_bias: bool = Field(False, description="A bias in an output projection of its own.")
    logit_scale: float = Field(1.0, gt=0, description="Factor on the logits.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Of embeddings and of what a branch adds to the residual."
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Of attention weights.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, dict) else None
        preset = PRESETS.get(name) if isinstance(name, str) else None
        return given if preset is None else {**preset.fields, **given}

    @property
    def mlp_hidden(self) -> int:
        return self.ffn_hidden if self.ffn_hidden is not None else 4 * self.hidden

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def shape(self) -> ModelShape:
        """What decides the model's FLOPs."""
        kinds: tuple[int | None, ...] = (None,)
        if self.window is not None:
            kinds = tuple(self.window if k == "local" else None for k in self.window_pattern)
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.num_kv_heads,
            mlp_hidden=self.mlp_hidden,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            gated=self.activation == "swiglu",
            windows=kinds,
        )
