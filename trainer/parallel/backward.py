"""A backward pass from a gradient, without what torch imports for one.

`torch.autograd.backward(output, grad)` imports torch.fx.experimental.symbolic_shapes, and with it
sympy, to compare two shapes: 0.3 s and 34 MiB in each process. A pass from a scalar does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def backward(output: Tensor, grad: Tensor | None) -> None:
    """Add gradients up in the leaves; `grad` is that of `output`, None where it is a scalar's."""
    if grad is not None:
        with torch.enable_grad():
            output = _Given.apply(output, grad)  # type: ignore[no-untyped-call]
    torch.autograd.backward(output)


class _Given(Function):
    """A scalar of which nothing is known but the gradient of what it was made of."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad, None
