"""Tensor and sequence parallelism as explicit autograd Functions.

A column-parallel linear holds some of the output features, a row-parallel one
some of the input features; a pair of them needs communication only at its
ends. With sequence parallelism the tensors between pairs are sharded over the
sequence: all-gather before the pair, reduce-scatter after it. Without it they
are replicated, and the pair ends in an all-reduce. In the backward pass each
changes places with its opposite.

A column-parallel linear keeps its own shard of the input, not the gathered
input, and gathers it again for the weight gradient.

The linear layers here exchange first and then compute; with more than one chunk
they are those of `trainer.parallel.overlap`, which do both at once.

Source: Megatron-LM (arXiv 1909.08053) and its sequence parallelism (2205.05198).
"""

# S sequence, B micro-batch, D model width, F features of a linear, V vocabulary,
# N = S*B tokens. Capitals are logical sizes; a rank's shard may be smaller.
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from trainer.parallel import overlap
from trainer.parallel.comm import Comm
from trainer.parallel.overlap import TensorParallel
from trainer.parallel.weight_gradients import WeightGradient

__all__ = [
    "TensorParallel",
    "column_linear",
    "group_rows",
    "group_total",
    "own_sequence",
    "row_linear",
    "summed_grad",
    "total",
    "vocab_embedding",
    "whole_sequence",
]


def column_linear(
    x_SBD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, tp: TensorParallel
) -> Tensor:
    """This rank's output features for the whole sequence."""
    function = overlap.ColumnLinear if tp.overlaps else _ColumnLinear
    weight_FD, gradient = tp.weight_gradients.use(weight_FD, x_SBD)
    out: Tensor = _apply(function, x_SBD, weight_FD, bias_F, tp, gradient)
    return out


def row_linear(
    x_SBF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, tp: TensorParallel
) -> Tensor:
    """The sum over the group of every rank's part, plus the bias once."""
    function = overlap.RowLinear if tp.overlaps else _RowLinear
    weight_DF, gradient = tp.weight_gradients.use(weight_DF, x_SBF)
    out: Tensor = _apply(function, x_SBF, weight_DF, tp, gradient)
    return out if bias_D is None else out + bias_D


def vocab_embedding(tokens_SB: Tensor, weight_VD: Tensor, tp: TensorParallel) -> Tensor:
    """Rows of an embedding whose vocabulary is split over the group."""
    out: Tensor = _apply(_VocabEmbedding, tokens_SB, weight_VD, tp)
    return out


def summed_grad(weight: Tensor, comm: Comm) -> Tensor:
    """The weight itself, whose gradient is the sum over the group of every rank's."""
    out: Tensor = _apply(_SummedGrad, weight, comm)
    return out


def whole_sequence(x_SBD: Tensor, tp: TensorParallel) -> Tensor:
    """The sequence from its parts, for ranks that each add to its gradient."""
    out: Tensor = _apply(_WholeSequence, x_SBD, tp)
    return out


def own_sequence(x_SBD: Tensor, tp: TensorParallel) -> Tensor:
    """The own part of the sequence, of the sum over the group."""
    out: Tensor = _apply(_OwnSequence, x_SBD, tp)
    return out


def total(value: Tensor, comm: Comm) -> Tensor:
    """The sum over the group of what each rank has a part of; a part has the sum's gradient."""
    out: Tensor = _apply(_Total, value, comm)
    return out


def group_total(value: Tensor, comm: Comm) -> Tensor:
    """The same sum, where each rank goes on with it by itself: a part has all their gradients."""
    out: Tensor = _apply(_GroupTotal, value, comm)
    return out


def group_rows(rows: Tensor, comm: Comm, ranks: int) -> Tensor:
    """All rows of the own group, of which each of its `ranks` consecutive ranks holds some."""
    out: Tensor = _apply(_GroupRows, rows, comm, ranks)
    return out


def _apply(function: type[Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBD: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        tp: TensorParallel,
        gradient: WeightGradient,
    ) -> Tensor:
        ctx.save_for_backward(x_SBD, weight_FD)
        ctx.tp, ctx.gradient, ctx.has_bias = tp, gradient, bias_F is not None
        return F.linear(_whole_sequence(x_SBD, tp), weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, grad_SBF: Tensor) -> tuple[Tensor | None, ...]:
        x_SBD, weight_FD = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        compute = partial(_column_weight_grad, tp)
        grad_weight = ctx.gradient.made(compute, grad_SBF, x_SBD)
        grad_x = _sum(grad_SBF @ weight_FD, tp)
        grad_bias = grad_SBF.sum(dim=(0, 1)) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBF: Tensor, weight_DF: Tensor, tp: TensorParallel, gradient: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(x_SBF, weight_DF)
        ctx.tp, ctx.gradient = tp, gradient
        return _sum(F.linear(x_SBF, weight_DF), tp)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        x_SBF, weight_DF = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        full_SBD = _whole_sequence(grad_SBD, tp)
        grad_x = full_SBD @ weight_DF
        if ctx.gradient.is_put_off:
            # Gathered once more then: the whole would be kept beside the ranks' parts.
            compute = partial(_row_weight_grad, tp)
            return grad_x, ctx.gradient.made(compute, grad_SBD, x_SBF), None, None
        return grad_x, _weight_grad(full_SBD, x_SBF), None, None


class _WholeSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_SBD: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return tp.comm.all_gather(x_SBD) if tp.sequence_parallel else x_SBD.view_as(x_SBD)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad_SBD.contiguous(), ctx.tp), None


class _OwnSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_SBD: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        # An all-reduce is done in place.
        return _sum(x_SBD if tp.sequence_parallel else x_SBD.clone(), tp)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        return _whole_sequence(grad_SBD, ctx.tp), None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(value.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _GroupTotal(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(value.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _SummedGrad(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.all_reduce(grad.contiguous()), None


class _GroupRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, ranks: int) -> Tensor:
        number = ranks * rows.shape[0]
        start = comm.index // ranks * number
        ctx.comm, ctx.own, ctx.num_rows = comm, slice(start, start + number), comm.size // ranks
        ctx.num_rows *= number
        # Without the other groups' memory.
        return comm.all_gather(rows)[ctx.own].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        full = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        full[ctx.own] = grad
        return ctx.comm.reduce_scatter(full), None, None


class _VocabEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens_SB: Tensor, weight_VD: Tensor, tp: TensorParallel) -> Tensor:
        rows_SB, inside_SB = own_rows(tokens_SB, weight_VD.shape[0], tp.comm)
        ctx.save_for_backward(rows_SB, inside_SB)
        ctx.tp, ctx.num_rows = tp, weight_VD.shape[0]
        return _sum(F.embedding(rows_SB, weight_VD) * inside_SB.unsqueeze(-1), tp)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        rows_SB, inside_SB = ctx.saved_tensors
        full_SBD = _whole_sequence(grad_SBD, ctx.tp)
        # A common token adds up thousands of rows: 16-bit sums would lose the last of them.
        wide_SBD = full_SBD.to(torch.promote_types(full_SBD.dtype, torch.float32))
        masked_ND = (wide_SBD * inside_SB.unsqueeze(-1)).flatten(0, 1)
        grad_VD = masked_ND.new_zeros((ctx.num_rows, masked_ND.shape[1]))
        grad_VD.index_add_(0, rows_SB.flatten(), masked_ND)
        return None, grad_VD.to(full_SBD.dtype), None


def own_rows(ids: Tensor, num_rows: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank's shard, and which of them are really in it."""
    rows = ids - comm.index * num_rows
    inside = (rows >= 0) & (rows < num_rows)
    return rows.clamp_(0, num_rows - 1), inside


def _column_weight_grad(tp: TensorParallel, grad_SBF: Tensor, x_SBD: Tensor) -> Tensor:
    return _weight_grad(grad_SBF, _whole_sequence(x_SBD, tp))


def _row_weight_grad(tp: TensorParallel, grad_SBD: Tensor, x_SBF: Tensor) -> Tensor:
    return _weight_grad(_whole_sequence(grad_SBD, tp), x_SBF)


def _weight_grad(grad_SBF: Tensor, x_SBD: Tensor) -> Tensor:
    return grad_SBF.flatten(0, 1).t() @ x_SBD.flatten(0, 1)


def _whole_sequence(x_SBD: Tensor, tp: TensorParallel) -> Tensor:
    return tp.comm.all_gather(x_SBD) if tp.sequence_parallel else x_SBD


def _sum(partial_SBD: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's rows of the sum over the group; all rows without sequence parallelism."""
    if tp.sequence_parallel:
        return tp.comm.reduce_scatter(partial_SBD)
    return tp.comm.all_reduce(partial_SBD)
