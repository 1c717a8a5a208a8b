"""Evaluation while a job trains: the loss on what is held out, by set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.data.loader import Loader
from trainer.optim.norms import sum_in_order
from trainer.worker.loss_factors import num_predicted
from trainer.worker.state import TrainState


def held_out_losses(
    state: TrainState, num_tokens: int, read: Callable[[Tensor], list[float]]
) -> dict[str, float]:
    """Mean loss of each held-out set, in nats for a token that is predicted; alike on all ranks.

    Every evaluation reads the same samples. `num_tokens` is of a global batch; `read` waits for
    numbers of the device.
    """
    mesh, num_batches = state.mesh, state.spec.eval.batches
    num_tokens *= num_batches

    def sums_of(loader: Loader) -> tuple[Tensor, Tensor]:
        """This rank's loss by all tokens, and how many of them have one."""
        total, predicted = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for number in range(1, num_batches + 1):
            micro_batches = loader.micro_batches(number)
            total += state.eval_engine.run(micro_batches, 1.0 / num_tokens)
            predicted += num_predicted(micro_batches)
        return total, predicted

    sets = state.data.evaluations
    row = torch.stack([each for loader in sets.values() for each in sums_of(loader)])
    if mesh.at.tp > 0 or not mesh.has_loss:
        row.zero_()
    numbers = read(mesh.fold(row, sum_in_order))
    return {
        name: total * (num_tokens / max(predicted, 1.0))
        for name, total, predicted in zip(sets, numbers[::2], numbers[1::2], strict=True)
    }
