"""Clipping by the true global norm.

Every tensor of the whole model counts once: shards on their own ranks,
replicated tensors on the first tensor rank, the tied embedding on the first
stage. Of the replicas each adds up its own shard of every bucket, with ZeRO and
without, so that the sum has the same bits at every level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.buckets import Bucket, overlap
from trainer.model.parameters import FlatParameters
from trainer.optim.norms import square_sum
from trainer.parallel.mesh import Mesh


def squared_norm_share(flat: FlatParameters, mesh: Mesh) -> Tensor:
    """What this rank adds to the squared global gradient norm, in fp64.

    The norm is the root of the sum over all ranks.
    """
    share = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for part in flat.parts:
        replicas = mesh.expert_dp if part.bucket.divided else mesh.dp
        shard = part.bucket.shard(replicas.index, replicas.size)
        own = overlap(_counted(part.bucket, mesh), shard)
        share += square_sum(part.grads[part.among(own)])
    return share


def clip_gradients(
    flat: FlatParameters, grad_norm: float, max_norm: float | None, *, scale: float = 1.0
) -> None:
    """Undo `scale` in all gradients, then scale them to a global norm of `max_norm` at most.

    `grad_norm` is the norm without the scale.
    """
    clips = max_norm is not None and grad_norm > max_norm
    factor = (max_norm / grad_norm if clips and max_norm is not None else 1.0) / scale
    if factor != 1.0:
        for part in flat.parts:
            part.grads.mul_(factor)


def _counted(bucket: Bucket, mesh: Mesh) -> slice:
    """What this rank must count of a bucket, were there no replicas."""
    if not bucket.counted:
        return slice(0, 0)
    return slice(0, bucket.size if mesh.at.tp == 0 else bucket.replicated.start)
