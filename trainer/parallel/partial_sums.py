"""Sums of gradients that ranks of one replica computed parts of.

Micro-batch losses are already divided by the tokens of the global batch, so
every sum here is the final gradient. The sum over replicas comes before
(`trainer.parallel.zero`).
"""

from __future__ import annotations

import torch

from trainer.model.parameters import FlatParameters
from trainer.parallel.mesh import Mesh


def sum_partial_gradients(flat: FlatParameters, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Sum what tensor ranks and both ends of the pipeline computed parts of.

    It comes after the sum over replicas, so that the two copies of a tied embedding
    add the same two numbers and stay equal for ever.
    """
    if sequence_parallel:
        # Each rank saw its own part of the sequence only. One message for all buckets.
        shares = [part.grads[part.among(part.bucket.replicated)] for part in flat.parts]
        joined = mesh.tp.all_reduce(torch.cat(shares))
        for share, total in zip(
            shares, torch.split(joined, [s.numel() for s in shares]), strict=True
        ):
            share.copy_(total)
    if mesh.embedding.size > 1:
        for part in flat.parts:
            if part.bucket.tied:
                mesh.embedding.all_reduce(part.grads)
