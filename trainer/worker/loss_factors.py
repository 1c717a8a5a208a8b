"""What sums of losses are multiplied with to become parts of means over the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.parallel.pipeline import MicroBatch
from trainer.worker.state import TrainState


def loss_factors(
    state: TrainState, micro_batches: Sequence[MicroBatch], scale: float
) -> float | Tensor:
    """The factor of a replica's tokens; with a loss of sequences theirs behind it, [2].

    Losses are where the model ends: gradients come to other stages with the factor in them, so
    these neither know nor ask how many tokens have a loss. `scale` keeps small gradients from
    becoming 0.
    """
    if not state.mesh.has_loss:
        return 1.0
    data = state.spec.data
    if not state.data.has_unpredicted:
        return scale / (data.global_batch * state.spec.model.seq_len)
    of_tokens = scale / _predicted_by_all(state, micro_batches)
    if not state.spec.model.sentence_order:
        return of_tokens
    return torch.stack((of_tokens, torch.full_like(of_tokens, scale / data.global_batch)))


def num_predicted(micro_batches: Sequence[MicroBatch]) -> int:
    """How many tokens of this rank's have a loss."""
    return sum(batch.num_predicted for batch in micro_batches)


def _predicted_by_all(state: TrainState, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """The tokens of the global batch that have a loss: the mean is over them."""
    # Ranks that divide sequences among them have counted their parts.
    replicas = state.mesh.dp
    number = torch.tensor(num_predicted(micro_batches), device=state.mesh.device)
    if replicas.size > 1:
        number = replicas.all_gather(number.view(1)).sum()
    return number.clamp(min=1).double()
