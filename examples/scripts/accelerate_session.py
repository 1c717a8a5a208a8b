"""A training loop with Hugging Face accelerate, and checkpoints in host memory after each step.

Under plain Python or torchrun the lines with `session` and `checkpoint` do nothing.

torchrun --nproc-per-node 2 accelerate_session.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast import session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    # The loader becomes torchdata's, and the order of an epoch follows from its number.
    data_settings = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=data_settings)
    accelerator.print("mixed precision:", accelerator.mixed_precision)
    set_seed(0)
    inputs = torch.randn(384, 64)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1))
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpoint = session.checkpoint(model=model, optimizer=optimizer, loader=loader)

    step = checkpoint.restore()
    while step < options.steps and not session.should_stop():
        loader.set_epoch(step // len(loader))
        for inputs, targets in loader:
            step += 1
            loss = (model(inputs).squeeze(1) - targets).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            session.step(step, loss=mean)
            accelerator.print(f"step {step} loss {mean:.9e}", flush=True)
            checkpoint.save(step)
            if step == options.steps or session.should_stop():
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
