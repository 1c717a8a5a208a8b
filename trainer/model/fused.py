"""Elementwise chains as single operations, each beside an eager twin.

| operation          | CPU                                  | CUDA          |
|--------------------|--------------------------------------|---------------|
| layer_norm         | one C++ kernel                       | the same      |
| rms_norm           | one C++ kernel                       | the same      |
| bias_activation    | C++ gelu or relu after the sum       | compiled twin |
| bias_gated         | C++ silu or gelu between sums        | compiled twin |
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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from trainer.model.config import Gate, Plain


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dim."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def eager_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim (arXiv 1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def eager_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return out if weight is None else out * weight


def bias_activation(x: Tensor, bias: Tensor | None, kind: Plain) -> Tensor:
    """The activation of x + bias; GELU is exact or its tanh approximation, relu2 relu's square."""
    if x.is_cuda:
        return compiled(eager_bias_activation)(x, bias, kind)
    biased = x if bias is None else x + bias
    match kind:
        case "relu":
            return F.relu(biased)
        case "relu2":
            return F.relu(biased).square()
        case _:
            return F.gelu(biased, approximate="tanh" if kind == "gelu_tanh" else "none")


def eager_bias_activation(x: Tensor, bias: Tensor | None, kind: Plain) -> Tensor:
    biased = x if bias is None else x + bias
    match kind:
        case "relu":
            return biased.clamp(min=0.0)
        case "relu2":
            return biased.clamp(min=0.0) ** 2
        case _:
            return _eager_gelu(biased, by_tanh=kind == "gelu_tanh")


def _eager_gelu(x: Tensor, *, by_tanh: bool) -> Tensor:
    if not by_tanh:
        return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def bias_gated(
    gate: Tensor, x: Tensor, gate_bias: Tensor | None, x_bias: Tensor | None, kind: Gate
) -> Tensor:
    """activation(gate + its bias) * (x + its bias): silu for swiglu (arXiv 2002.05202)."""
    if x.is_cuda:
        return compiled(eager_bias_gated)(gate, x, gate_bias, x_bias, kind)
    gate = gate if gate_bias is None else gate + gate_bias
    if kind == "swiglu":
        opened = F.silu(gate)
    else:
        opened = F.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none")
    return opened * (x if x_bias is None else x + x_bias)


def eager_bias_gated(
    gate: Tensor, x: Tensor, gate_bias: Tensor | None, x_bias: Tensor | None, kind: Gate
) -> Tensor:
    gate = gate if gate_bias is None else gate + gate_bias
    if kind == "swiglu":
        opened = gate * torch.sigmoid(gate)
    else:
        opened = _eager_gelu(gate, by_tanh=kind == "geglu_tanh")
    return opened * (x if x_bias is None else x + x_bias)


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
