"""The shape of the model and how it is computed; no tensors here.

The rows of a fused projection are ordered by group: one key/value head, the
query heads that share it and, in the parallel block, its share of the MLP. So a
contiguous shard of the projection holds whole groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.parallel.overlap import MIN_PIECE_BYTES

RecomputeMode = Literal["none", "selective", "full", "offload"]
Gate = Literal["swiglu", "geglu", "geglu_tanh"]
Plain = Literal["gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Frequencies changed for long sequences; `outlast.model.RopeScalingSpec` says what each is."""

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: float
    original_seq_len: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864): what turns, and how fast."""

    theta: float
    fraction: float
    pairs: Literal["halves", "neighbours"]
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts of a layer; `outlast.moe.MoeSpec` says what each field is."""

    num_experts: int
    per_token: int
    hidden: int
    normalises: bool
    shared_hidden: int
    shared_gate: bool
    pattern: tuple[Literal["experts", "dense"], ...]
    aux_loss: float
    aux_loss_over: Literal["layer", "model"]
    z_loss: float
    num_terms: int
    """Numbers that the router's losses are made of; 0: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """The shape of the model and how it is computed; `outlast.spec.ModelSpec` says what each is.

    `kv_heads` None means as many as `heads`, `head_dim` None hidden / heads, `vocab_rows` None
    as many as there are tokens, `qkv_bias` None as `attention_bias`. `window_pattern` says of
    each layer whether the window holds there, repeated over the depth; `local_rope` is for those
    layers, None as `rope`. In sequences that come with their documents, attention sees its own
    one only if `documents_apart`, and positions begin anew in each if `resets_positions`. Where
    ranks divide sequences, `context` says how attention gets at other parts.
    """

    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab_size: int
    seq_len: int
    tied_embeddings: bool
    norm_eps: float
    init_std: float
    sequence_parallel: bool
    dtype: torch.dtype
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab_rows: int | None = None
    bidirectional: bool = False
    documents_apart: bool = True
    resets_positions: bool = True
    block: Literal["serial", "parallel"] = "serial"
    block_norms: Literal[1, 2] = 1
    block_biases: Literal[1, 2] = 1
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_bias: bool = True
    norm_place: Literal["before", "after", "both", "sum"] = "before"
    norm_weight: Literal["plain", "one_plus", "none"] = "plain"
    qk_norm: Literal["none", "head", "all"] = "none"
    activation: Gate | Plain = "gelu_tanh"
    moe: MoeConfig | None = None
    learned_positions: bool = True
    alibi: bool = False
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    rope_pattern: tuple[Literal["rope", "none"], ...] = ("rope",)
    window: int | None = None
    window_pattern: tuple[Literal["local", "global"], ...] = ("local",)
    attention_bias: bool = True
    qkv_bias: bool | None = None
    mlp_bias: bool = True
    head_bias: bool = False
    head_transform: bool = False
    segments: int = 0
    sentence_order: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    seed: int = 0
    context: Literal["all_to_all", "ring"] = "all_to_all"
    tp_chunks: int = 1
    tp_min_piece_bytes: int = MIN_PIECE_BYTES
    recompute: RecomputeMode | tuple[RecomputeMode, ...] = "none"

    @property
    def residual_std(self) -> float:
        """Projections into the residual stream start smaller: 2 per layer add up (GPT-2)."""
        return self.init_std / math.sqrt(2 * self.layers)

    @property
    def groups(self) -> int:
        """Key/value heads, each with the query heads that share it."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Queries of all heads, and what attention gives."""
        return self.heads * self.head_width

    @property
    def table_rows(self) -> int:
        """Rows of a table of the vocabulary; those beyond the vocabulary are padding."""
        return self.vocab_size if self.vocab_rows is None else self.vocab_rows

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def group_query_rows(self) -> int:
        """Query rows of one group."""
        return self.query_width // self.groups

    @property
    def mlp_inputs(self) -> int:
        """Matrices into the MLP: a gated one has a gate beside its input."""
        return 2 if self.gate is not None else 1

    @property
    def gate(self) -> Gate | None:
        """The activation of an MLP that has a gate."""
        match self.activation:
            case "swiglu" | "geglu" | "geglu_tanh" as gate:
                return gate
        return None

    @property
    def drops(self) -> bool:
        return self.dropout > 0 or self.attention_dropout > 0

    def window_of(self, layer: int) -> int | None:
        """Tokens that `layer` attends to, the own one included; None: all before it."""
        # A window as long as the sequence hides nothing.
        wide = self.window is None or self.window >= self.seq_len
        return self.window if self.is_local(layer) and not wide else None

    def is_local(self, layer: int) -> bool:
        """Whether the model has a window at `layer`, however long."""
        kind = self.window_pattern[layer % len(self.window_pattern)]
        return self.window is not None and kind == "local"

    def rope_of(self, layer: int) -> RopeConfig | None:
        """How `layer` turns queries and keys; None: not at all."""
        kind = self.rope_pattern[layer % len(self.rope_pattern)]
        if kind == "none":
            return None
        return self.local_rope if self.local_rope and self.is_local(layer) else self.rope

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The experts of `layer`; None: it has an MLP."""
        if self.moe is None or self.moe.pattern[layer % len(self.moe.pattern)] == "dense":
            return None
        return self.moe

    @property
    def num_router_terms(self) -> int:
        """Numbers of the router's losses that go from chunk to chunk beside the stream."""
        return 0 if self.moe is None else self.moe.num_terms

    @property
    def num_moe_layers(self) -> int:
        return sum(self.moe_of(layer) is not None for layer in range(self.layers))

    def recompute_of(self, layer: int) -> RecomputeMode:
        """What the backward pass of `layer` computes again."""
        return self.recompute if isinstance(self.recompute, str) else self.recompute[layer]
