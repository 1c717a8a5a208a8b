"""Tokens grouped by the expert that they go to, and one matrix product for each group.

A token has a slot for each of its experts. Slots are sorted by expert, so that those of one are
consecutive rows; experts have their rows' products one after another. Nothing is padded and no
token is dropped, however uneven the groups are. Both ways rows are moved by index and added up
in the order of a token's choices: sums have the same bits on every device and each time.
"""

# N tokens, K choices of each, T = N K slots, E experts, D model width, F features of a linear.
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from trainer.parallel.weight_gradients import WeightGradient, WeightGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Where each slot stands among those sorted by expert.

    `order_T[i]` is the slot in row i, `rows_T[j]` the row of slot j; slot j is choice j % K of
    token j // K. `counts` are rows by expert, and `counts_E` the same on the device.
    """

    order_T: Tensor
    rows_T: Tensor
    counts_E: Tensor
    counts: list[int]
    choices: int

    @classmethod
    def of(cls, chosen_NK: Tensor, num_experts: int) -> Slots:
        """Sort the slots of tokens whose experts are chosen; equal ones keep their order."""
        flat_T = chosen_NK.reshape(-1)
        sorted_T, order_T = flat_T.sort(stable=True)
        rows_T = torch.empty_like(order_T)
        rows_T[order_T] = torch.arange(len(order_T), device=order_T.device)
        experts = torch.arange(num_experts, device=flat_T.device)
        ends = torch.searchsorted(sorted_T, experts, right=True)
        counts_E = ends.diff(prepend=ends.new_zeros(1))
        return cls(
            order_T=order_T,
            rows_T=rows_T,
            counts_E=counts_E,
            # The one wait for a device: products need their sizes.
            counts=counts_E.tolist(),
            choices=chosen_NK.shape[1],
        )


def spread(x_ND: Tensor, slots: Slots) -> Tensor:
    """Each slot's token, [T, D], sorted by expert."""
    out: Tensor = _Spread.apply(x_ND, slots)  # type: ignore[no-untyped-call]
    return out


def gathered(y_TD: Tensor, weights_NK: Tensor, slots: Slots) -> Tensor:
    """What a token's experts have made of it, [N, D]: the sum of its rows by their weights."""
    y_NKD = torch.unflatten(unsorted(y_TD, slots), 0, (-1, slots.choices))
    return (y_NKD * weights_NK.to(y_TD.dtype).unsqueeze(-1)).sum(dim=1)


def unsorted(y_TD: Tensor, slots: Slots) -> Tensor:
    """Rows by slot again."""
    out: Tensor = _Unsorted.apply(y_TD, slots)  # type: ignore[no-untyped-call]
    return out


def grouped_linear(
    x_TD: Tensor, weight_EFD: Tensor, slots: Slots, gradients: WeightGradients
) -> Tensor:
    """The rows of each expert times its matrix, [T, F]."""
    weight_EFD, gradient = gradients.use(weight_EFD, x_TD)
    arguments = (x_TD, weight_EFD, slots.counts, gradient)
    out: Tensor = _GroupedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x_ND.index_select(0, slots.order_T // slots.choices)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        slots = ctx.slots
        grads = grad_TD.index_select(0, slots.rows_T)
        return torch.unflatten(grads, 0, (-1, slots.choices)).sum(dim=1), None


class _Unsorted(Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return y_TD.index_select(0, slots.rows_T)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD.index_select(0, ctx.slots.order_T), None


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_EFD: Tensor,
        counts: list[int],
        gradient: WeightGradient,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight_EFD)
        ctx.counts, ctx.gradient = counts, gradient
        out_TF = x_TD.new_empty((x_TD.shape[0], weight_EFD.shape[1]))
        groups = zip(
            torch.split(x_TD, counts), weight_EFD, torch.split(out_TF, counts), strict=True
        )
        for x_tD, weight_FD, out_tF in groups:
            torch.mm(x_tD, weight_FD.t(), out=out_tF)
        return out_TF

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_EFD = ctx.saved_tensors
        grad_TF, grad_x = grad_TF.contiguous(), torch.empty_like(x_TD)
        rows = (torch.split(grad_TF, ctx.counts), torch.split(grad_x, ctx.counts))
        for weight_FD, grad_tF, grad_x_tD in zip(weight_EFD, *rows, strict=True):
            torch.mm(grad_tF, weight_FD, out=grad_x_tD)
        compute = partial(_weight_grad, ctx.counts)
        return grad_x, ctx.gradient.made(compute, grad_TF, x_TD), None, None


def _weight_grad(counts: list[int], grad_TF: Tensor, x_TD: Tensor) -> Tensor:
    """Of each expert, [E, F, D]; one without tokens has a gradient of zero."""
    grad_EFD = x_TD.new_empty((len(counts), grad_TF.shape[1], x_TD.shape[1]))
    groups = zip(torch.split(grad_TF, counts), torch.split(x_TD, counts), grad_EFD, strict=True)
    for grad_tF, x_tD, grad_FD in groups:
        torch.mm(grad_tF.t(), x_tD, out=grad_FD)
    return grad_EFD
