"""Elementwise chains as single operations, each beside an eager twin.

| operation          | CPU                                  | CUDA          |
|--------------------|--------------------------------------|---------------|
| layer_norm         | one C++ kernel                       | the same      |
| rms_norm           | one C++ kernel                       | the same      |
| bias_gelu          | C++ gelu after the sum               | compiled twin |
| bias_swiglu        | C++ silu between sums                | compiled twin |
| bias_dropout_add   | addcmul: mask, scale and residual    | compiled twin |
| masked_softmax     | C++ softmax, keeps the weights only  | compiled twin |

A twin (`eager_*`) is the definition in elementary operations. On CUDA
torch.compile fuses it into one Triton kernel each way; a test holds what runs
to its twin. Which mask an attention has is not decided here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

Gelu = Literal["gelu", "gelu_tanh"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dim."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim (arXiv 1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def bias_gelu(x: Tensor, bias: Tensor | None, kind: Gelu) -> Tensor:
    """GELU of x + bias, exact or by its tanh approximation."""
    if x.is_cuda:
        return compiled(eager_bias_gelu)(x, bias, kind)
    biased = x if bias is None else x + bias
    return F.gelu(biased, approximate="tanh" if kind == "gelu_tanh" else "none")


def eager_bias_gelu(x: Tensor, bias: Tensor | None, kind: Gelu) -> Tensor:
    biased = x if bias is None else x + bias
    if kind == "gelu":
        return 0.5 * biased * (1.0 + torch.erf(biased * math.sqrt(0.5)))
    inner = math.sqrt(2.0 / math.pi) * (biased + 0.044715 * biased**3)
    return 0.5 * biased * (1.0 + torch.tanh(inner))


def bias_swiglu(gate: Tensor, x: Tensor, gate_bias: Tensor | None, x_bias: Tensor | None) -> Tensor:
    """silu(gate + its bias) * (x + its bias) (arXiv 2002.05202)."""
    if x.is_cuda:
        return compiled(eager_bias_swiglu)(gate, x, gate_bias, x_bias)
    gate = gate if gate_bias is None else gate + gate_bias
    return F.silu(gate) * (x if x_bias is None else x + x_bias)


def eager_bias_swiglu(
    gate: Tensor, x: Tensor, gate_bias: Tensor | None, x_bias: Tensor | None
) -> Tensor:
    gate = gate if gate_bias is None else gate + gate_bias
    return gate * torch.sigmoid(gate) * (x if x_bias is None else x + x_bias)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, keep: Tensor | None
) -> Tensor:
    """residual + keep * (x + bias); `keep` is 0 or 1 / (1 - p) at each value, None: no dropout."""
    if x.is_cuda:
        return compiled(eager_bias_dropout_add)(x, bias, residual, keep)
    biased = x if bias is None else x + bias
    return residual + biased if keep is None else torch.addcmul(residual, biased, keep)


def eager_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, keep: Tensor | None
) -> Tensor:
    biased = x if bias is None else x + bias
    return residual + (biased if keep is None else keep * biased)


def masked_softmax(scores: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Softmax of scale * scores over the last dim, where `allowed` is True; 0 elsewhere.

    Every row needs a place that is allowed.
    """
    if scores.is_cuda:
        # The blocks of a window have up to six shapes, each with and without gradients:
        # more than dynamo compiles for fixed sizes before it goes on without compiling.
        return compiled(eager_masked_softmax, dynamic=True)(scores, allowed, scale)
    out: Tensor = _MaskedSoftmax.apply(scores, allowed, scale)  # type: ignore[no-untyped-call]
    return out


def eager_masked_softmax(scores: Tensor, allowed: Tensor, scale: float) -> Tensor:
    scaled = (scores * scale).masked_fill(~allowed, -math.inf)
    exp = torch.exp(scaled - scaled.amax(-1, keepdim=True))
    return exp / exp.sum(-1, keepdim=True)


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """`masked_softmax` where each query sees the keys up to its own; the last sees all."""
    return masked_softmax(scores, causal_mask(*scores.shape[-2:], device=scores.device), scale)


def eager_causal_softmax(scores: Tensor, scale: float) -> Tensor:
    return eager_masked_softmax(
        scores, causal_mask(*scores.shape[-2:], device=scores.device), scale
    )


def causal_mask(queries: int, keys: int, *, device: torch.device) -> Tensor:
    """[queries, keys]: True where a query may look; the last query stands at the last key."""
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return allowed.tril(keys - queries)


class _MaskedSoftmax(Function):
    """Keeps the weights only: neither the scaled nor the masked scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, allowed: Tensor, scale: float) -> Tensor:
        masked = (scores * scale).masked_fill_(~allowed, -math.inf)
        weights = torch.softmax(masked, dim=-1)
        ctx.save_for_backward(weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        weighted = grad * weights
        out = torch.addcmul(weighted, weights, weighted.sum(-1, keepdim=True), value=-1.0)
        return out.mul_(ctx.scale), None, None


@functools.cache
def compiled(
    twin: Callable[..., Tensor],
    *,
    dynamic: bool = False,
    backend: str | Callable[..., Any] = "inductor",
) -> Callable[..., Tensor]:
    """A twin as one kernel each way; `dynamic`: one for all sizes instead of one for each."""
    # On CUDA only: torch.compile imports torch._dynamo (2.7 s), which no CPU worker needs.
    return torch.compile(twin, dynamic=dynamic, backend=backend)
