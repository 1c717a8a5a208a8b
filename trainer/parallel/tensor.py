"""Tensor and sequence parallelism as explicit autograd Functions.

A column-parallel linear holds some of the output features, a row-parallel one
some of the input features; a pair of them needs communication only at its
ends. With sequence parallelism the tensors between pairs are sharded over the
sequence: all-gather before the pair, reduce-scatter after it. Without it they
are replicated, and the pair ends in an all-reduce. In the backward pass each
changes places with its opposite.

A column-parallel linear keeps its own shard of the input, not the gathered
input, and gathers it again for the weight gradient.

Source: Megatron-LM (arXiv 1909.08053) and its sequence parallelism (2205.05198).
"""

# S sequence, B micro-batch, D model width, F features of a linear, V vocabulary,
# N = S*B tokens. Capitals are logical sizes; a rank's shard may be smaller.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from trainer.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How a layer is split over its tensor group.

    `sequence_parallel` is False for a group of one: it has no sequence to split.
    """

    comm: Comm
    sequence_parallel: bool
    chunks: int = 1


def column_linear(
    x_SBD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, tp: TensorParallel
) -> Tensor:
    """This rank's output features for the whole sequence."""
    out: Tensor = _apply(_ColumnLinear, x_SBD, weight_FD, bias_F, tp.comm, tp.sequence_parallel)
    return out


def row_linear(
    x_SBF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, tp: TensorParallel
) -> Tensor:
    """The sum over the group of every rank's part, plus the bias once."""
    out: Tensor = _apply(_RowLinear, x_SBF, weight_DF, tp.comm, tp.sequence_parallel)
    return out if bias_D is None else out + bias_D


def vocab_embedding(tokens_SB: Tensor, weight_VD: Tensor, tp: TensorParallel) -> Tensor:
    """Rows of an embedding whose vocabulary is split over the group."""
    out: Tensor = _apply(_VocabEmbedding, tokens_SB, weight_VD, tp.comm, tp.sequence_parallel)
    return out


def _apply(function: type[Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, comm: Comm, sp: bool
    ) -> Tensor:
        ctx.save_for_backward(x_SBD, weight_FD)
        ctx.comm, ctx.sp, ctx.has_bias = comm, sp, bias_F is not None
        return F.linear(comm.all_gather(x_SBD) if sp else x_SBD, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, grad_SBF: Tensor) -> tuple[Tensor | None, ...]:
        x_SBD, weight_FD = ctx.saved_tensors
        full_SBD = ctx.comm.all_gather(x_SBD) if ctx.sp else x_SBD
        grad_x = grad_SBF @ weight_FD
        grad_x = ctx.comm.reduce_scatter(grad_x) if ctx.sp else ctx.comm.all_reduce(grad_x)
        grad_bias = grad_SBF.sum(dim=(0, 1)) if ctx.has_bias else None
        return grad_x, _weight_grad(grad_SBF, full_SBD), grad_bias, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_SBF: Tensor, weight_DF: Tensor, comm: Comm, sp: bool) -> Tensor:
        ctx.save_for_backward(x_SBF, weight_DF)
        ctx.comm, ctx.sp = comm, sp
        partial_SBD = F.linear(x_SBF, weight_DF)
        return comm.reduce_scatter(partial_SBD) if sp else comm.all_reduce(partial_SBD)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        x_SBF, weight_DF = ctx.saved_tensors
        full_SBD = ctx.comm.all_gather(grad_SBD) if ctx.sp else grad_SBD
        return full_SBD @ weight_DF, _weight_grad(full_SBD, x_SBF), None, None


class _VocabEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens_SB: Tensor, weight_VD: Tensor, comm: Comm, sp: bool) -> Tensor:
        rows_SB, inside_SB = own_rows(tokens_SB, weight_VD.shape[0], comm)
        ctx.save_for_backward(rows_SB, inside_SB)
        ctx.comm, ctx.sp, ctx.num_rows = comm, sp, weight_VD.shape[0]
        partial_SBD = F.embedding(rows_SB, weight_VD) * inside_SB.unsqueeze(-1)
        return comm.reduce_scatter(partial_SBD) if sp else comm.all_reduce(partial_SBD)

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        rows_SB, inside_SB = ctx.saved_tensors
        full_SBD = ctx.comm.all_gather(grad_SBD) if ctx.sp else grad_SBD
        masked_ND = (full_SBD * inside_SB.unsqueeze(-1)).flatten(0, 1)
        grad_VD = masked_ND.new_zeros((ctx.num_rows, masked_ND.shape[1]))
        grad_VD.index_add_(0, rows_SB.flatten(), masked_ND)
        return None, grad_VD, None, None


def own_rows(ids: Tensor, num_rows: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank's shard, and which of them are really in it."""
    rows = ids - comm.index * num_rows
    inside = (rows >= 0) & (rows < num_rows)
    return rows.clamp_(0, num_rows - 1), inside


def _weight_grad(grad_SBF: Tensor, x_SBD: Tensor) -> Tensor:
    return grad_SBF.flatten(0, 1).t() @ x_SBD.flatten(0, 1)
