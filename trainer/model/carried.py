"""What goes from chunk to chunk beside the stream: the terms of the router's losses.

They are more rows of the stream's tensor, bit by bit in its own type, so that a message stays
one tensor, and the gradients of the terms come back with that of the stream. A model whose
router has no losses has no such rows.
"""

# S sequence, B micro-batch, D model width, R terms, J sequence and the rows of the terms.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from trainer.model.config import GptConfig
from trainer.parallel.tensor import TensorParallel


def carried_rows(config: GptConfig, micro_batch: int, tp_size: int) -> int:
    """Rows of [B, D] that hold the terms; as many parts as there are tensor ranks."""
    wide = torch.promote_types(config.dtype, torch.float32)
    values = config.num_router_terms * wide.itemsize // config.dtype.itemsize
    return -(-values // (micro_batch * config.hidden)) * tp_size if values else 0


def joined(x_SBD: Tensor, terms_R: Tensor | None, tp: TensorParallel) -> Tensor:
    """The stream and the terms as one tensor, [J, B, D]."""
    if terms_R is None:
        return x_SBD
    out: Tensor = _Joined.apply(x_SBD, terms_R, tp.comm.size)  # type: ignore[no-untyped-call]
    return out


def apart(
    joined_JBD: Tensor, config: GptConfig, tp: TensorParallel
) -> tuple[Tensor, Tensor | None]:
    """The stream and the terms of what `joined` gave."""
    if config.num_router_terms == 0:
        return joined_JBD, None
    rows = carried_rows(config, joined_JBD.shape[1], tp.comm.size)
    x_SBD, terms_R = _Apart.apply(joined_JBD, rows, config.num_router_terms)  # type: ignore[no-untyped-call]
    return x_SBD, terms_R


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, x_SBD: Tensor, terms_R: Tensor, tp_size: int) -> Tensor:
        joined, ctx.rows = _join(x_SBD, terms_R, tp_size)
        ctx.num_terms = len(terms_R)
        return joined

    @staticmethod
    def backward(ctx: Any, grad_JBD: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_terms = _cut(grad_JBD, ctx.rows, ctx.num_terms)
        return grad_x.contiguous(), grad_terms, None


class _Apart(Function):
    @staticmethod
    def forward(ctx: Any, joined_JBD: Tensor, rows: int, num_terms: int) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        x_SBD, terms_R = _cut(joined_JBD, rows, num_terms)
        return x_SBD.view_as(x_SBD), terms_R

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_terms: Tensor) -> tuple[Tensor | None, ...]:
        joined, _ = _join(grad_x, grad_terms, 1, rows=ctx.rows)
        return joined, None, None


def _join(x_SBD: Tensor, terms_R: Tensor, tp_size: int, rows: int = 0) -> tuple[Tensor, int]:
    values = terms_R.view(x_SBD.dtype)
    row = x_SBD.shape[1] * x_SBD.shape[2]
    rows = rows or -(-len(values) // row) * tp_size
    carried = x_SBD.new_zeros(rows * row)
    carried[: len(values)] = values
    return torch.cat((x_SBD, carried.view(rows, *x_SBD.shape[1:]))), rows


def _cut(joined_JBD: Tensor, rows: int, num_terms: int) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(joined_JBD.dtype, torch.float32)
    x_SBD, carried = joined_JBD[:-rows], joined_JBD[-rows:].flatten()
    values = num_terms * exact.itemsize // carried.itemsize
    # A copy: fp32 numbers must not begin in the middle of such.
    return x_SBD, carried[:values].clone().view(exact)
