"""Model FLOPs of a token: what `outlast plan` foretells and the controller measures by.

A weight that a token is multiplied with costs two FLOPs forward and four
backward. Attention costs the same for each of its two products with every key
that a token attends to. How many keys those are is a convention:

- `full`: all of the sequence, as most published figures have it (PaLM, arXiv
  2204.02311; Megatron-LM, arXiv 2104.04473). It counts work that no causal
  kernel does, so long sequences or windows can carry a utilization over 100 %.
- `windowed`: the keys that the causal mask and the window let through, on
  average `w - w(w - 1) / 2s`. Nothing is counted that is not computed.

Embedding look-ups, norms and activations are not counted, and what recompute
computes again is not model work: `recomputed_flops_per_token` has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle


class Convention(StrEnum):
    """How many keys a token is counted to attend to."""

    FULL = "full"
    WINDOWED = "windowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The experts of a layer, of which each token is multiplied with a few."""

    number: int
    per_token: int
    hidden: int
    shared_hidden: int = 0
    """Of what every token goes through beside them."""
    shared_gate: bool = False
    layers: tuple[bool, ...] = (True,)
    """Whether a layer has them, repeated over the depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder-only transformer that decide its matrix products."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    vocab_size: int
    seq_len: int
    head_width: int | None = None
    """Values of one head; None: hidden / heads."""
    gated: bool = False
    """The MLP has a gate beside its input projection (SwiGLU)."""
    windows: tuple[int | None, ...] = (None,)
    """Tokens a layer attends to, repeated over the depth; None: all before it."""
    causal: bool = True
    """Tokens attend to none behind them."""
    head_transform: bool = False
    """There is a linear layer before the output projection."""
    experts: ExpertShape | None = None

    @property
    def query_width(self) -> int:
        """Values of a token's queries, all heads together; attention gives as many."""
        return self.hidden if self.head_width is None else self.head_width * self.heads

    @property
    def kv_width(self) -> int:
        """Values of a token's keys, all heads together; its values have as many."""
        return self.query_width // self.heads * self.kv_heads

    @property
    def qkv_width(self) -> int:
        return self.query_width + 2 * self.kv_width

    @property
    def mlp_in_width(self) -> int:
        """Outputs of the MLP's input projection, the gate's included."""
        return (2 if self.gated else 1) * self.mlp_hidden

    @property
    def mlp_matrices(self) -> int:
        """Matrices of the model's width by the MLP's."""
        return 3 if self.gated else 2

    @property
    def attention_weights(self) -> int:
        """Weights of a block's attention that a token is multiplied with."""
        return self.hidden * (self.qkv_width + self.query_width)

    def block_weights(self, layer: int) -> int:
        """Weights of one block that a token is multiplied with."""
        experts = self.experts_of(layer)
        widths, others = self.mlp_hidden, 0
        if experts is not None:
            widths = experts.per_token * experts.hidden + experts.shared_hidden
            others = self.hidden * (experts.number + experts.shared_gate)
        return self.attention_weights + self.hidden * self.mlp_matrices * widths + others

    def experts_of(self, layer: int) -> ExpertShape | None:
        """The experts of one layer; None: it has an MLP."""
        experts = self.experts
        if experts is None or not experts.layers[layer % len(experts.layers)]:
            return None
        return experts

    def window_of(self, layer: int) -> int | None:
        """Tokens that one layer attends to; None: all before it."""
        return self.windows[layer % len(self.windows)]

    @property
    def period(self) -> int:
        """After so many layers they repeat."""
        of_experts = 1 if self.experts is None else len(self.experts.layers)
        return math.lcm(len(self.windows), of_experts)


def mean_keys(shape: ModelShape, window: int | None, convention: Convention) -> float:
    """Keys that a token attends to in one layer, the mean over the sequence."""
    if convention is Convention.FULL or not shape.causal:
        return shape.seq_len
    width = min(shape.seq_len, window or shape.seq_len)
    return width - width * (width - 1) / (2 * shape.seq_len)


def flops_per_token(shape: ModelShape, convention: Convention) -> float:
    """FLOPs of forward and backward for one token."""
    period, layers = shape.period, shape.layers
    # Layers that are a period apart are alike: of a deep model few need looking at.
    counts = {first: (layers - first - 1) // period + 1 for first in range(min(period, layers))}
    blocks = sum(count * shape.block_weights(layer) for layer, count in counts.items())
    weights = blocks + shape.hidden * (shape.vocab_size + shape.head_transform * shape.hidden)
    return 6 * weights + 3 * sum(
        count * _attention_flops(shape, shape.window_of(layer), convention)
        for layer, count in counts.items()
    )


def recomputed_flops_per_token(
    shape: ModelShape, modes: Iterable[str], convention: Convention
) -> float:
    """FLOPs that the backward pass spends on what it did not keep, by each layer's mode."""
    total = 0.0
    counts = Counter(zip(modes, cycle(range(shape.period)), strict=False))
    for (mode, layer), count in counts.items():
        if mode == "none":
            continue
        total += count * _attention_flops(shape, shape.window_of(layer), convention)
        if mode == "full":
            total += count * 2 * shape.block_weights(layer)
    return total


def hardware_flops_per_token(
    shape: ModelShape, modes: Iterable[str], convention: Convention
) -> float:
    """FLOPs that devices do for one token: the model's, and what is computed a second time.

    By the peak of the devices they are the hardware FLOPs utilization (HFU), as model FLOPs are
    the model FLOPs utilization (MFU): with tokens/s T, devices n and peak P of each,
    HFU = T (model + recomputed) / (n P) and MFU = T model / (n P), so HFU >= MFU, and equal
    without recompute.

    Source: PaLM, arXiv 2204.02311, section 4.1 and appendix B.
    """
    again = recomputed_flops_per_token(shape, modes, convention)
    return flops_per_token(shape, convention) + again


def utilization(flops_per_s: float, *, devices: int, peak_flops_per_s: float) -> float:
    """Utilization, of model or hardware FLOP/s: their share of what the devices could do."""
    return flops_per_s / (devices * peak_flops_per_s)


def _attention_flops(shape: ModelShape, window: int | None, convention: Convention) -> float:
    """Forward FLOPs of one layer's two attention products for one token."""
    return 4 * shape.query_width * mean_keys(shape, window, convention)
