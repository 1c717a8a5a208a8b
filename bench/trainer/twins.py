"""Fused operations on a device held to their eager twins: what they give, and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from outlast.blackbox import Group
from trainer.model import fused
from trainer.model.attention import masked_sdpa
from trainer.model.window import flex_attention, windowed_attention
from trainer.parallel.comm import Comm
from trainer.parallel.tensor import TensorParallel
from trainer.parallel.vocab import vocab_loss

# bf16 has 8 bits of mantissa; a few roundings of them meet in a value. On a CPU torch's
# layer_norm also sums the gradients of its weight and bias over rows in bf16.
TOLERANCES = {"cuda": 2.0**-6, "cpu": 2.0**-4}
_WINDOW = 100
_ALONE = TensorParallel(comm=Comm(group=Group.TP, ranks=(0,), index=0), sequence_parallel=False)

Operation = Callable[..., Tensor]
# The operation, its twin, and the tensors that both take and differentiate.
Pair = tuple[Operation, Operation, tuple[Tensor, ...]]


def check_twins(device: torch.device) -> dict[str, float]:
    """Largest difference to the twin, of the result and of any gradient, as a share of values.

    Raises:
        ValueError: one is off by more than bf16 rounds.
    """
    found = {name: _difference(*pair) for name, pair in _pairs(device).items()}
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCES[device.type]}
    if wrong:
        raise ValueError(f"fused operations differ from their eager twins: {wrong}")
    return found


def _difference(operation: Operation, twin: Operation, tensors: tuple[Tensor, ...]) -> float:
    # The twin in fp32: its own rounding must not count.
    wide = tuple(tensor.float() for tensor in tensors)
    pairs = zip(_results(operation, tensors), _results(twin, wide), strict=True)
    return max(
        ((ours.float() - expected).abs().max() / expected.abs().max()).item()
        for ours, expected in pairs
    )


def _results(operation: Operation, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result, and the gradient of each tensor for the same gradient of the result."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = operation(*leaves)
    generator = torch.Generator().manual_seed(2)
    # Of bf16's values, so that both sides get the same.
    grad = torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(out)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def _pairs(device: torch.device) -> Mapping[str, Pair]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, other, row, bias = random(256, 2, 512), random(256, 2, 512), random(512), random(512)
    keep = (random(256, 2, 512) > 0) * torch.full((), 2.0, dtype=torch.bfloat16, device=device)
    targets = torch.randint(512, (128, 2), generator=generator).to(device)
    heads = tuple(random(2, 4, 512, 64) for _ in range(3))

    def dropped(operation: Operation) -> Operation:
        return lambda x, bias, residual: operation(x, bias, residual, keep.to(x.dtype))

    return {
        "layer_norm": (*_with_last(1e-5, fused.layer_norm, fused.eager_layer_norm), (x, row, bias)),
        "rms_norm": (*_with_last(1e-5, fused.rms_norm, fused.eager_rms_norm), (x, row)),
        "bias_activation": (
            *_with_last("gelu_tanh", fused.bias_activation, fused.eager_bias_activation),
            (x, bias),
        ),
        "bias_gated": (
            *_with_last("swiglu", fused.bias_gated, fused.eager_bias_gated),
            (x, other, bias, row),
        ),
        "bias_dropout_add": (
            dropped(fused.bias_dropout_add),
            dropped(fused.eager_bias_dropout_add),
            (x, bias, other),
        ),
        "causal_softmax": (
            *_with_last(0.125, fused.causal_softmax, fused.eager_causal_softmax),
            (random(2, 4, 128, 128),),
        ),
        "windowed_attention": (_windowed(device), _eager_windowed_attention, heads),
        "vocab_loss": (
            partial(_chunked_loss, targets_SB=targets),
            partial(_eager_loss, targets_SB=targets),
            (random(128, 2, 64), random(512, 64) / 8),
        ),
    }


def _with_last(last: object, one: Operation, twin: Operation) -> tuple[Operation, Operation]:
    """The operation and its twin with one more argument, the same for both."""
    return lambda *tensors: one(*tensors, last), lambda *tensors: twin(*tensors, last)


def _windowed(device: torch.device) -> Operation:
    """What attention with a window runs on this device."""
    if device.type == "cuda":
        return partial(flex_attention, window=_WINDOW)
    return partial(windowed_attention, window=_WINDOW, core=masked_sdpa)


def _eager_windowed_attention(q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor) -> Tensor:
    places = torch.arange(q_BHSC.shape[2], device=q_BHSC.device)
    distance_SS = places[:, None] - places
    scores = q_BHSC @ k_BHSC.transpose(-1, -2) * q_BHSC.shape[-1] ** -0.5
    hidden_SS = (distance_SS < 0) | (distance_SS >= _WINDOW)
    return scores.masked_fill(hidden_SS, float("-inf")).softmax(dim=-1) @ v_BHSC


def _chunked_loss(hidden_SBD: Tensor, weight_VD: Tensor, *, targets_SB: Tensor) -> Tensor:
    # Four chunks of tokens.
    logits = targets_SB.numel() * weight_VD.shape[0] // 4
    return vocab_loss(hidden_SBD, weight_VD, targets_SB, _ALONE, max_logits=logits)


def _eager_loss(hidden_SBD: Tensor, weight_VD: Tensor, *, targets_SB: Tensor) -> Tensor:
    logs_NV = (hidden_SBD @ weight_VD.t()).flatten(0, 1).log_softmax(dim=-1)
    return -logs_NV.gather(1, targets_SB.flatten().unsqueeze(1)).sum()
