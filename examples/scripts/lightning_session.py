"""The same as lightning_fit.py with a callback: checkpoints in host memory after each step.

Under plain Python or torchrun the callback does nothing.

torchrun --nproc-per-node 2 lightning_session.py
"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.integrations.lightning import SessionCallback


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1)]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = (self.layers(inputs).squeeze(1) - targets).square().mean()
        mean = self.all_gather(loss.detach()).mean().item()
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} loss {mean:.9e}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    lightning.seed_everything(0)
    inputs = torch.randn(384, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sin().sum(dim=1))
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=options.epochs,
        callbacks=[SessionCallback()],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=16, shuffle=True)
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
