"""Tokens on their way to replicas that have the experts they go to, and back.

The experts of a layer are divided among the ranks of a group: rank r has the r-th part of
them. Rows are sorted by expert, and so by rank; all ranks say how many rows there are for each
expert, then the rows follow in one exchange. What comes from one rank is sorted by expert
again. Backwards the gradients go the other way. Sizes differ from step to step: nothing is
padded, and nothing is dropped.

Source: GShard (arXiv 2006.16668), without its capacity.
"""

# E experts, M members of the group, D model width, T rows.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from trainer.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Rows that a rank sends to each member and receives from each.

    `experts_T` has of each row that is received which of the own experts it is for.
    """

    comm: Comm
    sent: list[int]
    received: list[int]
    experts_T: Tensor

    @classmethod
    def of(cls, counts_E: Tensor, comm: Comm) -> Exchange:
        """By how many rows the own tokens have for each expert. All members call it together."""
        counts_MME = torch.unflatten(comm.all_gather(counts_E.unsqueeze(0)), 1, (comm.size, -1))
        from_each_ME = counts_MME[:, comm.index]
        own = torch.arange(from_each_ME.shape[1], device=counts_E.device)
        # The one wait for a device.
        rows = counts_MME.sum(dim=-1).tolist()
        received = [row[comm.index] for row in rows]
        return cls(
            comm=comm,
            sent=rows[comm.index],
            received=received,
            experts_T=torch.repeat_interleave(
                own.repeat(comm.size), from_each_ME.flatten(), output_size=sum(received)
            ),
        )

    def there(self, rows_TD: Tensor) -> Tensor:
        """The rows for the own experts, from each member."""
        return _moved(rows_TD, self.sent, self.received, self.comm)

    def back(self, rows_TD: Tensor) -> Tensor:
        """What members have made of the own rows, in their order."""
        return _moved(rows_TD, self.received, self.sent, self.comm)


def _moved(rows_TD: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm) -> Tensor:
    out: Tensor = _Moved.apply(rows_TD, sent, received, comm)  # type: ignore[no-untyped-call]
    return out


class _Moved(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_TD: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.comm = sent, received, comm
        return comm.all_to_all(rows_TD, sent, received)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.comm.all_to_all(grad_TD, ctx.received, ctx.sent), None, None, None
