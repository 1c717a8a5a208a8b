"""Linear layers whose communication runs under their own matrix products.

An all-gather is cut into chunks that leave at once. The products of this rank's
own rows need no message and come first; then those of each chunk as it arrives.
A reduce-scatter is cut likewise: a chunk of every peer's rows is computed and
leaves under the next one's product; this rank's own rows come last, and are added
to what has arrived in group order. Weight gradients need no peer's answer, or
need it last, so they fill what remains of a transfer in the backward pass:

    column forward    gather x in chunks under y = x W'
    column backward   gather x under dx = dy W, whose chunks scatter under dW = dy' x
    row forward       scatter chunks of y = x W' under its other chunks
    row backward      gather dy in chunks under own dW = dy' x and dx = dy W

Without sequence parallelism there is nothing to gather, and an all-reduce takes
the place of the reduce-scatter. Where weight gradients are put off
(`trainer.parallel.weight_gradients`), what they gather arrives under their own products.

What is exchanged and how is the business of `trainer.parallel.comm`; the forms
without overlap are in `trainer.parallel.tensor`.

Source: MegaScale (NSDI '24), section 3.2, "Overlapping in tensor/sequence
parallelism".
"""

# S sequence, B micro-batch, D model width, F features of a linear, M members of the
# group, N = S*B tokens; n the tokens of one rank's shard of the sequence, N = M*n.
# Capitals are logical sizes; a rank's shard of D, F or S may be smaller.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from outlast.blackbox import Op
from trainer.parallel.comm import Comm, PendingReduce, sum_in_order
from trainer.parallel.weight_gradients import WeightGradient, WeightGradients

# A message costs about 0.2 ms of a processor, however small it is (measured with gloo):
# what 64 KiB take at 2.6 Gbit/s. Smaller pieces cost more than they could hide.
MIN_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How a layer is split over its tensor group.

    `sequence_parallel` is False for a group of one: it has no sequence to split.
    `chunks` is how many pieces a message is cut into, so that it hides behind the
    matrix product beside it; 1 turns overlap off. Fewer and larger pieces are made
    where they would be smaller than `min_piece_bytes`.
    """

    comm: Comm
    sequence_parallel: bool
    chunks: int = 1
    min_piece_bytes: int = MIN_PIECE_BYTES
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks}, must be at least 1")

    @property
    def overlaps(self) -> bool:
        return self.chunks > 1 and self.comm.size > 1

    def pieces(self, rows: Tensor) -> list[slice]:
        """The ranges of rows that travel as one message each."""
        most = rows.nbytes // max(1, self.min_piece_bytes)
        return pieces(rows.shape[0], min(self.chunks, most))


class ColumnLinear(Function):
    """The overlapped form of `tensor.column_linear`."""

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
        if not tp.sequence_parallel:
            return F.linear(x_SBD, weight_FD, bias_F)
        out_NF = _Gather(_rows(x_SBD), tp).product(weight_FD.t(), bias_F)
        return out_NF.view(-1, x_SBD.shape[1], weight_FD.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_SBF: Tensor) -> tuple[Tensor | None, ...]:
        x_SBD, weight_FD = ctx.saved_tensors
        backward = _column_backward_split if ctx.tp.sequence_parallel else _column_backward
        grad_NF = _rows(grad_SBF)
        grad_x, grad_weight = backward(_rows(x_SBD), weight_FD, grad_NF, ctx.tp, ctx.gradient)
        grad_bias = grad_NF.sum(dim=0) if ctx.has_bias else None
        return grad_x.view(x_SBD.shape), grad_weight, grad_bias, None, None


class RowLinear(Function):
    """The overlapped form of `tensor.row_linear`, without its bias."""

    @staticmethod
    def forward(
        ctx: Any, x_SBF: Tensor, weight_DF: Tensor, tp: TensorParallel, gradient: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(x_SBF, weight_DF)
        ctx.tp, ctx.gradient = tp, gradient
        start = _Scatter if tp.sequence_parallel else _Reduce
        out_ND = start(_rows(x_SBF), weight_DF.t(), tp).wait()
        return out_ND.view(-1, x_SBF.shape[1], weight_DF.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_SBD: Tensor) -> tuple[Tensor | None, ...]:
        x_SBF, weight_DF = ctx.saved_tensors
        grad_ND, x_NF = _rows(grad_SBD), _rows(x_SBF)
        if ctx.tp.sequence_parallel:
            grad_x, grad_weight = _row_backward_split(
                x_NF, weight_DF, grad_ND, ctx.tp, ctx.gradient
            )
        else:
            grad_x = grad_ND @ weight_DF
            grad_weight = ctx.gradient.made(_weight_grad, grad_ND, x_NF)
        return grad_x.view(x_SBF.shape), grad_weight, None, None


def _column_backward_split(
    x_nD: Tensor, weight_FD: Tensor, grad_NF: Tensor, tp: TensorParallel, gradient: WeightGradient
) -> tuple[Tensor, Tensor | None]:
    # Posted before the scatter, so that its messages go first: they are needed first.
    gather = None if gradient.is_put_off else _Gather(x_nD, tp)
    scatter = _Scatter(grad_NF, weight_FD, tp)

    def compute(grad_NF: Tensor, x_nD: Tensor) -> Tensor:
        gathered = gather or _Gather(x_nD, tp)
        grads_MnF = _by_member(grad_NF, tp.comm)
        grad_weight = _weight_grad(grads_MnF[tp.comm.index], x_nD)
        gathered.wait()
        return _add_products(grad_weight, grads_MnF, gathered.shards, tp.comm)

    grad_weight = gradient.made(compute, grad_NF, x_nD)
    return scatter.wait(), grad_weight


def _column_backward(
    x_ND: Tensor, weight_FD: Tensor, grad_NF: Tensor, tp: TensorParallel, gradient: WeightGradient
) -> tuple[Tensor, Tensor | None]:
    reduce = _Reduce(grad_NF, weight_FD, tp)
    grad_weight = gradient.made(_weight_grad, grad_NF, x_ND)
    return reduce.wait(), grad_weight


def _row_backward_split(
    x_NF: Tensor, weight_DF: Tensor, grad_nD: Tensor, tp: TensorParallel, gradient: WeightGradient
) -> tuple[Tensor, Tensor | None]:
    gather = _Gather(grad_nD, tp)
    if gradient.is_put_off:
        # Gathered once more then: whole gradients would be kept beside the ranks' parts.
        grad_weight = gradient.made(partial(_row_weight_grad, tp), grad_nD, x_NF)
        return gather.product(weight_DF, None), grad_weight
    xs_MnF = _by_member(x_NF, tp.comm)
    own_weight = _weight_grad(grad_nD, xs_MnF[tp.comm.index])
    grad_x = gather.product(weight_DF, None)
    return grad_x, _add_products(own_weight, gather.shards, xs_MnF, tp.comm)


def _row_weight_grad(tp: TensorParallel, grad_nD: Tensor, x_NF: Tensor) -> Tensor:
    gather, xs_MnF = _Gather(grad_nD, tp), _by_member(x_NF, tp.comm)
    grad_weight = _weight_grad(grad_nD, xs_MnF[tp.comm.index])
    gather.wait()
    return _add_products(grad_weight, gather.shards, xs_MnF, tp.comm)


def _weight_grad(grad_NF: Tensor, x_ND: Tensor) -> Tensor:
    return grad_NF.t() @ x_ND


class _Gather:
    """Every member's rows, arriving in chunks."""

    def __init__(self, own_nD: Tensor, tp: TensorParallel) -> None:
        comm = self._comm = tp.comm
        self._pieces = tp.pieces(own_nD)
        # One per member; those of the peers are whole after `wait` or `product`.
        self.shards = [
            own_nD if member == comm.index else torch.empty_like(own_nD)
            for member in range(comm.size)
        ]
        self._exchanges = [
            comm.start_exchange([shard[piece] for shard in self.shards], Op.ALL_GATHER)
            for piece in self._pieces
        ]
        for exchange, piece in zip(self._exchanges, self._pieces, strict=True):
            exchange.send([own_nD[piece]] * comm.size)

    def product(self, matrix_DF: Tensor, bias_F: Tensor | None) -> Tensor:
        """All rows times a matrix, [N, F]: own ones first, others as they arrive."""
        own_nD = self.shards[self._comm.index]
        out_MnF = own_nD.new_empty((self._comm.size, own_nD.shape[0], matrix_DF.shape[1]))
        _product_into(out_MnF[self._comm.index], own_nD, matrix_DF, bias_F)
        for piece in self._arrivals():
            for peer in self._comm.peers:
                _product_into(out_MnF[peer, piece], self.shards[peer][piece], matrix_DF, bias_F)
        return out_MnF.flatten(0, 1)

    def wait(self) -> None:
        for _ in self._arrivals():
            pass

    def _arrivals(self) -> Iterator[slice]:
        for exchange, piece in zip(self._exchanges, self._pieces, strict=True):
            exchange.wait()
            yield piece


class _Scatter:
    """Own rows of the sum over the group of x times a matrix; the peers' rows have left."""

    def __init__(self, x_NF: Tensor, matrix_FD: Tensor, tp: TensorParallel) -> None:
        comm = tp.comm
        xs_MnF = _by_member(x_NF, comm)
        # Every member's part of the own rows. Separate, because one of them is the result.
        self._parts = [
            x_NF.new_empty((xs_MnF.shape[1], matrix_FD.shape[1])) for _ in range(comm.size)
        ]
        self._pieces = tp.pieces(self._parts[0])
        self._exchanges = [
            comm.start_exchange([part[piece] for part in self._parts], Op.REDUCE_SCATTER)
            for piece in self._pieces
        ]
        for exchange, piece in zip(self._exchanges, self._pieces, strict=True):
            # The entry of this rank stays as it is: nobody receives it.
            outgoing = list(self._parts)
            for peer in comm.peers:
                outgoing[peer] = xs_MnF[peer, piece] @ matrix_FD
            exchange.send(outgoing)
        torch.mm(xs_MnF[comm.index], matrix_FD, out=self._parts[comm.index])

    def wait(self) -> Tensor:
        for exchange, piece in zip(self._exchanges, self._pieces, strict=True):
            exchange.wait()
            parts = [part[piece] for part in self._parts]
            sum_in_order(parts, parts[0])
        return self._parts[0]


class _Reduce:
    """The sum over the group of x times a matrix; chunks are all-reduced as they are made."""

    def __init__(self, x_NF: Tensor, matrix_FD: Tensor, tp: TensorParallel) -> None:
        self._out_ND = x_NF.new_empty((x_NF.shape[0], matrix_FD.shape[1]))
        self._reduces: list[PendingReduce] = []
        for piece in tp.pieces(self._out_ND):
            torch.mm(x_NF[piece], matrix_FD, out=self._out_ND[piece])
            if self._reduces:
                self._reduces[-1].advance()
            self._reduces.append(tp.comm.start_all_reduce(self._out_ND[piece]))

    def wait(self) -> Tensor:
        for reduce in self._reduces:
            reduce.wait()
        return self._out_ND


def pieces(num_rows: int, chunks: int) -> list[slice]:
    """Consecutive ranges that cover all rows: at most `chunks`, none empty, one row apart."""
    count = max(1, min(chunks, num_rows))
    bounds = [num_rows * index // count for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def _rows(x_SBD: Tensor) -> Tensor:
    return x_SBD.flatten(0, 1).contiguous()


def _product_into(out_NF: Tensor, x_ND: Tensor, matrix_DF: Tensor, bias_F: Tensor | None) -> None:
    if bias_F is None:
        torch.mm(x_ND, matrix_DF, out=out_NF)
    else:
        torch.addmm(bias_F, x_ND, matrix_DF, out=out_NF)


def _by_member(x_NF: Tensor, comm: Comm) -> Tensor:
    """Rows of the whole sequence, [M, n, F]: whose shard they belong to first."""
    return x_NF.view(comm.size, x_NF.shape[0] // comm.size, -1)


def _add_products(
    total: Tensor, lefts: Sequence[Tensor] | Tensor, rights: Sequence[Tensor] | Tensor, comm: Comm
) -> Tensor:
    """Add left' right of every peer to `total`, always in the same order."""
    for peer in comm.peers:
        total.addmm_(lefts[peer].t(), rights[peer])
    return total
