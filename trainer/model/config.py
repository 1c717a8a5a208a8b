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

RecomputeMode = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864): what turns, and how fast."""

    theta: float
    fraction: float
    pairs: Literal["halves", "neighbours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """The shape of the model and how it is computed; `outlast.spec.ModelSpec` says what each is.

    `kv_heads` None means as many as `heads`. `window_pattern` says of each layer
    whether the window holds there, repeated over the depth.
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
    block: Literal["serial", "parallel"] = "serial"
    block_norms: Literal[1, 2] = 1
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_bias: bool = True
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    learned_positions: bool = True
    rope: RopeConfig | None = None
    window: int | None = None
    window_pattern: tuple[Literal["local", "global"], ...] = ("local",)
    attention_bias: bool = True
    mlp_bias: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    seed: int = 0
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
        return self.hidden // self.heads

    @property
    def group_query_rows(self) -> int:
        """Query rows of one group."""
        return self.hidden // self.groups

    @property
    def group_attention_rows(self) -> int:
        """Query, key and value rows of one group."""
        return self.group_query_rows + 2 * self.head_width

    @property
    def mlp_inputs(self) -> int:
        """Matrices into the MLP: a gated one has a gate beside its input."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def drops(self) -> bool:
        return self.dropout > 0 or self.attention_dropout > 0

    def window_of(self, layer: int) -> int | None:
        """Tokens that `layer` attends to, the own one included; None: all before it."""
        kind = self.window_pattern[layer % len(self.window_pattern)]
        # A window as long as the sequence hides nothing.
        wide = self.window is None or self.window >= self.seq_len
        return None if wide or kind == "global" else self.window

    def recompute_of(self, layer: int) -> RecomputeMode:
        """What the backward pass of `layer` computes again."""
        return self.recompute if isinstance(self.recompute, str) else self.recompute[layer]
