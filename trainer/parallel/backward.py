"""A backward pass from a gradient, without what torch imports for one.

`torch.autograd.backward(output, grad)` imports torch.fx.experimental.symbolic_shapes, and with it
sympy, to compare two shapes: 0.3 s and 34 MiB in each process. A pass from a scalar does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def backward(output: Tensor, grad: Tensor | None) -> None:
    """Add gradients up in the leaves; `grad` is that of `output`, None where it is a scalar's."""
    if grad is None:
        torch.autograd.backward(output)
    else:
        backward_all((output,), (grad,))


def backward_all(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add gradients up in the leaves of several outputs, each with its own gradient."""
    with torch.enable_grad():
        scalar = _Given.apply(len(outputs), *outputs, *grads)  # type: ignore[no-untyped-call]
    torch.autograd.backward(scalar)


class _Given(Function):
    """A scalar of which nothing is known but the gradients of what it was made of."""

    @staticmethod
    def forward(ctx: Any, count: int, first: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others[count - 1 :])
        return first.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        return None, *grads, *(None for _ in grads)
