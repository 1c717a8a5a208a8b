"""Clipping by the true global norm.

Every tensor of the whole model counts once: shards on their own ranks,
replicated tensors on the first tensor rank, the tied embedding on the first
stage. Replicas hold equal gradients after synchronisation and count once too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.parameters import FlatParameters
from trainer.parallel.mesh import Mesh


def squared_norm_share(flat: FlatParameters, mesh: Mesh) -> Tensor:
    """What this rank adds to the squared global gradient norm, in fp64.

    Sums over tp and pp alone give the norm; over dp too, when other replicas
    than the first add nothing.
    """
    if mesh.at.dp > 0:
        return torch.zeros((), dtype=torch.float64, device=flat.grads.device)
    counted = [
        flat.view(flat.grads, name)
        for name, facts in flat.facts.items()
        if facts.counted and (facts.is_sharded or mesh.at.tp == 0)
    ]
    norms = torch.stack(torch._foreach_norm(counted)) if counted else flat.grads.new_zeros(1)
    return norms.to(torch.float64).square().sum()


def clip_gradients(flat: FlatParameters, grad_norm: float, max_norm: float | None) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`."""
    if max_norm is not None and grad_norm > max_norm:
        flat.grads.mul_(max_norm / grad_norm)
