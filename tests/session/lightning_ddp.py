"""A script of the tests: Lightning's DDP with a validation after each epoch, a shuffled loader.

`lightning_ddp.py [EVENT STEP]`: raise there; prints what each step saw, by the step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.lightning import SessionCallback


class Model(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not read for its types
    def __init__(self, fault: list[str]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.fault = fault
        self.seen: dict[int, list[float]] = {}

    def strike(self, event: str) -> None:
        if self.fault == [event, f"{self.global_step}"]:
            print(json.dumps(self.seen), flush=True)
            raise RuntimeError(event)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.strike("training")
        loss: Tensor = self.layers(batch[0]).square().mean()
        self.seen[self.global_step] = [*batch[0].flatten().tolist(), loss.item()]
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.strike("validation")
        self.log("loss_there", self.layers(batch[0] + torch.rand(1)).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    rows = TensorDataset(torch.arange(48.0).unsqueeze(1))
    model = Model(sys.argv[1:])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        callbacks=[SessionCallback()],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(rows, 4, shuffle=True), DataLoader(rows, 8))
    print(json.dumps(model.seen), flush=True)


if __name__ == "__main__":
    main()
