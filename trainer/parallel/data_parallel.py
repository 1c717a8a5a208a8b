"""Gradient synchronisation after the backward passes of a step.

Micro-batch losses are already divided by the tokens of the global batch, so
every sum here is the final gradient. All gradients of a rank lie in one flat
buffer, and each of the three sums is one operation on a slice of it.
"""

from __future__ import annotations

from trainer.model.parameters import FlatParameters
from trainer.parallel.mesh import Mesh


def sync_gradients(flat: FlatParameters, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Sum gradients over everything that computed a part of them.

    The order matters for bits: replicas first, so that the two copies of a tied
    embedding add the same two numbers and stay equal for ever.
    """
    mesh.dp.all_reduce(flat.grads)
    if sequence_parallel:
        # Each rank saw its own part of the sequence only.
        mesh.tp.all_reduce(flat.grads[flat.replicated])
    if mesh.embedding.size > 1:
        mesh.embedding.all_reduce(flat.grads[flat.tied])
