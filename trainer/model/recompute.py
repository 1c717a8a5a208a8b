"""Compute a part of the model again in the backward pass instead of keeping its insides.

The part runs without recording; the backward pass runs it once more, recorded,
and goes on backwards from there, so gradients are bitwise those of a part that
kept everything. Its collectives are issued again on every rank of the group, in
the same order, since all ranks of a group recompute the same layers.

What it keeps, its inputs, may be in host memory meanwhile (`trainer.model.offload`). Each part's
backward pass begins to bring back those of the part before it, which come while it computes.

torch.utils.checkpoint does as much, but its first call imports torch._dynamo
(2.7 s), which each restarted worker would pay for.

Source: Chen et al. (arXiv 1604.06174); selective: Korthikanti et al. (2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from trainer.model.offload import InHostMemory
from trainer.parallel.backward import backward_all


def recompute(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`run(*inputs)`, keeping nothing but the inputs for the backward pass.

    `run` gives the same result each time. Gradients of the parameters inside it
    add up in their `grad`.
    """
    (out,) = recompute_all(lambda *inputs: (run(*inputs),), *inputs)
    return out


def recompute_all(
    run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, offload: bool = False
) -> tuple[Tensor, ...]:
    """As `recompute`, for several results; `offload`: keep the inputs in host memory."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    kind = _Offloaded if offload else _Recomputed
    out: tuple[Tensor, ...] = kind.apply(run, *inputs)  # type: ignore[no-untyped-call]
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
        return _backward(ctx, ctx.saved_tensors, grads)


class _Offloaded(Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.kept = [InHostMemory(tensor) for tensor in inputs]
        # Of whoever made the inputs, if that is such a part, too: the next one to be needed.
        made_by = {tensor.grad_fn for tensor in inputs}
        ctx.next = [kept for node in made_by for kept in getattr(node, "kept", ())]
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [kept.take() for kept in ctx.kept]
        for kept in ctx.next:
            kept.bring_back()
        del ctx.kept, ctx.next
        return _backward(ctx, inputs, grads)


def _backward(
    ctx: Any, kept: Sequence[Tensor], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Run the part again, and go backwards through it."""
    inputs = [
        tensor.detach().requires_grad_(needed)
        for tensor, needed in zip(kept, ctx.needs_input_grad[1:], strict=True)
    ]
    with torch.enable_grad():
        outs = ctx.run(*inputs)
    backward_all(outs, grads)
    return None, *(tensor.grad for tensor in inputs)
