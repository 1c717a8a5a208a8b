"""Swaps an exchange with a local sum for gloo's own reduce-scatter, under torch's own parallelism.

gloo's reduce-scatter moves the bytes of an all-reduce. Outlast does not use it; a
comparison that left it in the baseline would credit overlap with the transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


@contextmanager
def exchanged_reduce_scatter() -> Iterator[None]:
    """Within it, FSDP2 and DTensor reduce-scatter by all-to-all and a sum."""
    plain, functional_form = dist.reduce_scatter_tensor, functional.reduce_scatter_tensor
    dist.reduce_scatter_tensor = _reduce_scatter
    functional.reduce_scatter_tensor = _functional_reduce_scatter
    try:
        yield
    finally:
        dist.reduce_scatter_tensor = plain
        functional.reduce_scatter_tensor = functional_form


def _reduce_scatter(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> None:
    """The signature of torch.distributed.reduce_scatter_tensor; always done on return."""
    received = torch.empty_like(input)
    dist.all_to_all_single(received, input.contiguous(), group=group)
    size = dist.get_world_size(group)
    torch.sum(received.view(size, *output.shape), 0, out=output)
    if op == dist.ReduceOp.AVG:
        output.div_(size)


def _functional_reduce_scatter(
    self: Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
) -> Tensor:
    """The signature of the functional form; scatters along `scatter_dim`."""
    process_group = group[0].get_group(group[1]) if isinstance(group, tuple) else group
    size = dist.get_world_size(process_group)
    parts = torch.cat(self.chunk(size, dim=scatter_dim)) if scatter_dim else self
    output = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    op = dist.ReduceOp.AVG if reduceOp == "avg" else dist.ReduceOp.SUM
    _reduce_scatter(output, parts, op, process_group)
    return output
