"""Context parallelism: ranks that each have a part of every sequence, and of attention some heads.

Between attentions each token is computed by itself, where it is. For attention the ranks swap:
each gives away its tokens' values of all heads but its own, and gets all tokens' of these. So
attention is that of whole sequences over fewer heads, whatever it masks, and afterwards the
ranks swap back. Ranks that share a key/value head get a copy each; their gradients add up.

One message of queries, keys and values there and one of outputs back, and the same backwards:
each rank sends (c - 1)/c of its own part of these, whatever the length of the sequence.

Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).
"""

# S sequence, L own part of it, B micro-batch, H query heads, G key/value heads, C head width,
# P ranks of the group. Heads are those of a tensor rank.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from trainer.parallel.comm import Comm


def heads_apart(
    q_LBHC: Tensor, k_LBGC: Tensor, v_LBGC: Tensor, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the own part of the sequence with all heads, the whole sequence with the own heads."""
    copies = max(1, comm.size // k_LBGC.shape[2])
    parts = [q_LBHC, *(torch.repeat_interleave(x, copies, dim=2) for x in (k_LBGC, v_LBGC))]
    # By the rank that they are for.
    divided = [torch.unflatten(x, 2, (comm.size, -1)).permute(2, 0, 1, 3, 4) for x in parts]
    swapped_PLBHC = _swapped(torch.cat(divided, dim=3), comm)
    q_SBHC, k_SBGC, v_SBGC = torch.split(
        swapped_PLBHC.flatten(0, 1), [x.shape[3] for x in divided], dim=2
    )
    return q_SBHC, k_SBGC, v_SBGC


def heads_together(mixed_SBHC: Tensor, comm: Comm) -> Tensor:
    """Of the whole sequence with the own heads, its own part with all heads."""
    divided_PLBHC = torch.unflatten(mixed_SBHC, 0, (comm.size, -1))
    return _swapped(divided_PLBHC, comm).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _swapped(parts_P: Tensor, comm: Comm) -> Tensor:
    """The part that each rank has for this one, for the parts that this one has for each."""
    out: Tensor = _Swapped.apply(parts_P, comm)  # type: ignore[no-untyped-call]
    return out


class _Swapped(Function):
    @staticmethod
    def forward(ctx: Any, parts_P: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return _exchange(parts_P, comm)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor | None, ...]:
        # Who got a part gives its gradient back.
        return _exchange(grad_P, ctx.comm), None


def _exchange(parts_P: Tensor, comm: Comm) -> Tensor:
    one_each = [1] * comm.size
    return comm.all_to_all(parts_P.contiguous(), one_each, one_each)
