"""The micro-batches of a step, as a function of the step number.

There is no iterator to save: `trainer.core.batch` computes what any step reads,
so a resumed run reads exactly what it would have read.
"""

from __future__ import annotations

import torch

from trainer.core.batch import BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.parallel.pipeline import MicroBatch


class Loader:
    """One replica's view of a data set."""

    def __init__(
        self, dataset: TokenDataset, plan: BatchPlan, *, replica: int, device: torch.device
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._replica = replica
        self._device = device

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """What this replica reads at `step`, counted from 1."""
        batches = []
        for index in range(self._plan.num_micro_batches):
            samples = self._plan.samples(step, self._replica, index)
            tokens, targets = self._dataset.read(samples)
            batches.append(
                MicroBatch(tokens=tokens.to(self._device), targets=targets.to(self._device))
            )
        return batches
