"""Whose loss or gradient is NaN or Inf, so that its rank is heard first.

All ranks learn of it in the same moment, from sums. Losses are not spread before they are
summed; gradients are, so what each rank holds is compared when it has happened, and only then.

What does not belong here: the step that is done again because of it (`trainer.recovery.replay`).
"""

from __future__ import annotations

import math
import time
from typing import NoReturn

import torch
from torch import Tensor

from outlast.errors import FatalError
from trainer.core.suspects import makers
from trainer.optim.norms import square_sum
from trainer.worker.state import TrainState

# Less than what makes a rank hang, and enough to write a traceback on a busy machine.
CULPRIT_FIRST_S = 1.0


class NonFiniteLossError(FatalError):
    """The loss or the gradient is not a number; the weights were not touched."""


def fail(
    state: TrainState, step: int, *, loss: float, own_loss: Tensor, grad_norm: float
) -> NoReturn:
    """End this rank because the agreed `loss` or `grad_norm` of a step is NaN or Inf.

    Every rank calls it; `own_loss` is this one's share. Who made it ends first: the first word
    stops all ranks, and one that is killed has not written down what it knows.

    Raises:
        NonFiniteLossError: always; its words say whose it is, as far as that can be known.
    """
    of_loss = of_norm = ""
    if not math.isfinite(loss):
        of_loss = " of another rank" if bool(own_loss.isfinite()) else ""
    else:
        found = _makers_of_gradient(state)
        if found:
            of_norm = " of this rank" if state.mesh.rank in found else " of another rank"
    if "another" in of_loss + of_norm:
        time.sleep(CULPRIT_FIRST_S)
    raise NonFiniteLossError(
        f"step {step}: loss {loss}{of_loss}, gradient norm {grad_norm}{of_norm}; lower "
        "optimizer.lr, or look at the data of this step"
    )


def _makers_of_gradient(state: TrainState) -> frozenset[int]:
    """Ranks that made a gradient without a norm; empty where nobody can know."""
    mesh = state.mesh
    if state.flat.level:
        # The owner of a shard holds what any replica has made.
        return frozenset()
    # Copies of a tied table apart: both ends of a pipeline have added up their gradients.
    num_ranks, chunks = mesh.layout.world_size, state.spec.parallel.virtual_stages
    row = torch.zeros(2, num_ranks, dtype=torch.int64, device=mesh.device)
    for is_copy in (False, True):
        parts = [part for part in state.flat.parts if part.bucket.tied is is_copy]
        squares = [square_sum(part.grads) for part in parts]
        row[int(is_copy), mesh.rank] = int(not all(bool(each.isfinite()) for each in squares))
    bad = mesh.fold(row.view(-1), lambda rows: rows.amax(dim=0)).bool().tolist()
    return makers(bad[:num_ranks], mesh.layout, num_chunks=chunks, copies=bad[num_ranks:])
