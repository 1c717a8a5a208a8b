"""torch's own attention kernels, with what is needed to merge and to undo a part of attention.

`scaled_dot_product_attention` keeps the logarithms of its sums of exponentials to itself. A rank
that attends to one block of keys after another needs them: to merge what it has found, and to go
backwards with the sums over all blocks. The operators below it give and take them; torch's
context parallelism uses the same ones. They are not part of torch's documented interface, so they
are tried beside plain products at their first use on a device, on parts of larger tensors as a
ring has them, and are left alone should they differ.

What does not belong here: masks (`trainer.parallel.ring` computes those pairs itself).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_OPS: Any = torch.ops.aten
# The kernel for GPUs is of these types only.
_NARROW = (torch.float16, torch.bfloat16)
_PIECE = 8
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
    # The kernel for GPUs reads the sums as if one row came right behind the other.
    given = (grad_BHQC, query_BHQC, key_BGKC, value_BGKC, out_BHQC, sums_BHQ.contiguous())
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
    """Whether pieces, one after the other, give what all of them at once give."""
    if device.type != "cpu" and dtype not in _NARROW:
        return False
    try:
        found = _tried(device, dtype, width)
    except torch.OutOfMemoryError:
        # That says nothing of the kernel, and would be remembered.
        raise
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        _tell(device, dtype, width, f"fails: {error}")
        return False
    off = max(float((one.double() - other.double()).abs().max()) for one, other in found)
    if not off <= _TOLERANCE[dtype]:
        _tell(device, dtype, width, f"is off by {off:.2g}")
        return False
    return True


def _tell(device: torch.device, dtype: torch.dtype, width: int, why: str) -> None:
    print(
        f"torch's attention kernel of {dtype} and width {width} on {device} {why}; "
        "rings compute by plain products, which is slower",
        file=sys.stderr,
        flush=True,
    )


def _tried(device: torch.device, dtype: torch.dtype, width: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients of a few tokens by the kernel, each beside that of plain products."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(2, heads, 2 * _PIECE, width, generator=generator).to(device, dtype)
        for heads in (4, 2, 2, 4)
    )
    scale = width**-0.5
    with torch.enable_grad():
        leaves = [each.double().clone().requires_grad_() for each in (query, key, value)]
        wide_key, wide_value = (each.repeat_interleave(2, dim=1) for each in leaves[1:])
        scores = leaves[0] @ wide_key.transpose(-1, -2) * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).triu(1)
        expected = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ wide_value
        grads = torch.autograd.grad(expected, leaves, grad.double())
    # As in a ring: keys and values lie in one block, and of all tensors pieces are looked at.
    found = _by_pieces(query, torch.stack((key, value)), grad, scale)
    return list(zip(found, (expected.detach(), *grads), strict=True))


def _by_pieces(query: Tensor, block: Tensor, grad: Tensor, scale: float) -> list[Tensor]:
    """Output and gradients of two pieces of a causal sequence: each with itself, and the later
    one with the earlier one."""
    first, second = slice(0, _PIECE), slice(_PIECE, 2 * _PIECE)
    pairs = ((first, first, True), (second, second, True), (second, first, False))
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
    out = torch.zeros(query.shape, dtype=wide, device=query.device)
    for rows, keys, is_causal in pairs:
        key, value = block[:, :, :, keys]
        part, own = attend(query[:, :, rows], key, value, is_causal=is_causal, scale=scale)
        both = torch.logaddexp(sums[:, :, rows], own)
        before = out[:, :, rows] * (sums[:, :, rows] - both).exp().unsqueeze(-1)
        out[:, :, rows] = before + part * (own - both).exp().unsqueeze(-1)
        sums[:, :, rows] = both
    out = out.to(query.dtype)
    back = [torch.zeros_like(each, dtype=wide) for each in (query, *block)]
    for rows, keys, is_causal in pairs:
        key, value = block[:, :, :, keys]
        parts = attend_backward(
            grad[:, :, rows],
            query[:, :, rows],
            key,
            value,
            out[:, :, rows],
            sums[:, :, rows],
            is_causal=is_causal,
            scale=scale,
        )
        for whole, part, where in zip(back, parts, (rows, keys, keys), strict=True):
            whole[:, :, where] += part
    return [out, *back]
