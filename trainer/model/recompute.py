"""Compute a part of the model again in the backward pass instead of keeping its insides.

The part runs without recording; the backward pass runs it once more, recorded,
and goes on backwards from there, so gradients are bitwise those of a part that
kept everything. Its collectives are issued again on every rank of the group, in
the same order, since all ranks of a group recompute the same layers.

torch.utils.checkpoint does as much, but its first call imports torch._dynamo
(2.7 s), which each restarted worker would pay for.

Source: Chen et al. (arXiv 1604.06174); selective: Korthikanti et al. (2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from trainer.parallel.backward import backward_all


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`run(*inputs)`, keeping nothing but the inputs for the backward pass.

    `run` gives the same result each time. Gradients of the parameters inside it
    add up in their `grad`.
    """
    (out,) = recompute_all(lambda *inputs: (run(*inputs),), *inputs)
    return out


def recompute_all(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """As `recompute`, for several results."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    out: tuple[Tensor, ...] = _Recomputed.apply(run, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Recomputed(Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            outs = ctx.run(*inputs)
        backward_all(outs, grads)
        return None, *(tensor.grad for tensor in inputs)
