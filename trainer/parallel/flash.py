"""torch's own attention kernels, with what is needed to merge and to undo a part of attention.

`scaled_dot_product_attention` keeps the logarithms of its sums of exponentials to itself. A rank
that attends to one block of keys after another needs them: to merge what it has found, and to go
backwards with the sums over all blocks. The operators below it give and take them; torch's
context parallelism uses the same ones. They are not part of torch's documented interface, so each
is tried beside plain products at its first use on a device, and is left alone should it differ.

What does not belong here: masks (`trainer.parallel.ring` computes those pairs itself).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_OPS: Any = torch.ops.aten
# The kernel for GPUs is of these types only.
_NARROW = (torch.float16, torch.bfloat16)
# Of values near 1; a wrong sum of exponentials is off by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def is_usable(query_BHQC: Tensor) -> bool:
    """Whether there is such a kernel for tensors like this one."""
    return _works(query_BHQC.device, query_BHQC.dtype, query_BHQC.shape[-1])


def attend(
    query_BHQC: Tensor, key_BGKC: Tensor, value_BGKC: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Mixtures of these values [B, H, Q, C], and the logarithms of the sums [B, H, Q] in fp32
    at least. `is_causal`: queries and keys are the same tokens."""
    if query_BHQC.device.type == "cpu":
        found = _OPS._scaled_dot_product_flash_attention_for_cpu(
            query_BHQC, key_BGKC, value_BGKC, 0.0, is_causal, scale=scale
        )
    else:
        found = _OPS._scaled_dot_product_flash_attention(
            query_BHQC, key_BGKC, value_BGKC, 0.0, is_causal, False, scale=scale
        )
    return found[0], found[1]


def attend_backward(
    grad_BHQC: Tensor,
    query_BHQC: Tensor,
    key_BGKC: Tensor,
    value_BGKC: Tensor,
    out_BHQC: Tensor,
    sums_BHQ: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; outputs and sums are those over all keys."""
    given = (grad_BHQC, query_BHQC, key_BGKC, value_BGKC, out_BHQC, sums_BHQ)
    if query_BHQC.device.type == "cpu":
        grads = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, is_causal, scale=scale
        )
    else:
        # Nothing is dropped, so that nothing is drawn.
        drawn = torch.zeros(2, dtype=torch.uint64, device=query_BHQC.device)
        grads = _OPS._scaled_dot_product_flash_attention_backward(
            *given,
            None,
            None,
            query_BHQC.shape[2],
            key_BGKC.shape[2],
            0.0,
            is_causal,
            drawn,
            drawn.new_zeros(()),
            scale=scale,
        )
    of_query, of_key, of_value = grads
    return of_query, of_key, of_value


@lru_cache(maxsize=64)
def _works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether two blocks of keys, one after the other, give what all of them at once give."""
    if device.type != "cpu" and dtype not in _NARROW:
        return False
    try:
        found = _tried(device, dtype, width)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError):
        return False
    return all(
        torch.allclose(one.double(), other.double(), rtol=0, atol=_TOLERANCE[dtype])
        for one, other in found
    )


def _tried(device: torch.device, dtype: torch.dtype, width: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients of a few tokens by the kernel, each beside that of plain products."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(1, heads, 16, width, generator=generator).to(device, dtype)
        for heads in (4, 2, 2, 4)
    ]
    query, key, value, grad = drawn
    scale = width**-0.5
    with torch.enable_grad():
        leaves = [each.double().requires_grad_() for each in (query, key, value)]
        wide_key, wide_value = (each.repeat_interleave(2, dim=1) for each in leaves[1:])
        weights = (leaves[0] @ wide_key.transpose(-1, -2) * scale).softmax(dim=-1)
        expected = weights @ wide_value
        grads = torch.autograd.grad(expected, leaves, grad.double())
    halves = [(key[:, :, part], value[:, :, part]) for part in (slice(0, 8), slice(8, 16))]
    parts = [attend(query, *half, is_causal=False, scale=scale) for half in halves]
    sums = torch.logaddexp(*(each[1] for each in parts))
    out = sum(found * (own - sums).exp().unsqueeze(-1) for found, own in parts)
    assert isinstance(out, Tensor)
    out = out.to(dtype)
    back = [
        attend_backward(grad, query, *half, out, sums, is_causal=False, scale=scale)
        for half in halves
    ]
    found = [
        out,
        back[0][0] + back[1][0],
        *(torch.cat([each[place] for each in back], dim=2) for place in (1, 2)),
    ]
    return list(zip(found, (expected.detach(), *grads), strict=True))
