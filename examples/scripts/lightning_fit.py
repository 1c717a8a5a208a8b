"""Training with Lightning, as one writes it for torchrun.

torchrun --nproc-per-node 2 lightning_fit.py --checkpoints /tmp/lightning
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))

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
    parser.add_argument("--checkpoints", required=True, help="folder of checkpoints")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    lightning.seed_everything(0)
    inputs = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sin().sum(dim=1))
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=options.epochs,
        # At the end of each epoch: what resumes within one begins with its first batch again.
        callbacks=[ModelCheckpoint(options.checkpoints, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=16, shuffle=True)
    trainer.fit(Model(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
