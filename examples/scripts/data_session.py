"""Checkpoints in host memory with a loader of torchdata, which knows its place in the data.

Worker processes read the samples. After a fault training goes on with the batch that was due.

torchrun --nproc-per-node 2 data_session.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast import session


class Sines(Dataset):
    def __len__(self) -> int:
        return 384

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sin().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(Sines())
    loader = StatefulDataLoader(Sines(), batch_size=16, sampler=sampler, num_workers=2)
    checkpoint = session.checkpoint(model=model, optimizer=optimizer, loader=loader)

    step = checkpoint.restore()
    while step < options.steps and not session.should_stop():
        # The order of an epoch is the sampler's, and not in the state of the loader.
        sampler.set_epoch(step // len(loader))
        for inputs, targets in loader:
            step += 1
            loss = (model(inputs.to(device)).squeeze(1) - targets.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss)
            session.step(step, loss=loss.item() / world_size)
            if rank == 0:
                print(f"step {step} loss {loss.item() / world_size:.9e}", flush=True)
            checkpoint.save(step)
            if step == options.steps or session.should_stop():
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
