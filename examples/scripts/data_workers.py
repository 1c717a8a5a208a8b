"""Data-parallel training with worker processes of a DataLoader, as one writes it for torchrun.

torchrun --nproc-per-node 2 data_workers.py --checkpoint /tmp/data_workers.pt
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    """Samples with noise that is the same in every worker, and another in each epoch."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, place: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, index = place
        inputs = torch.randn(64, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(64, generator=torch.Generator().manual_seed(len(self) * epoch + index))
        return inputs + 0.01 * noise, inputs.sin().sum()


class ResumableSampler(DistributedSampler):
    """Places (epoch, index), from a sample of the epoch on: workers that persist see no change."""

    first = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first, self.first = self.first, 0
        return ((self.epoch, index) for index in list(super().__iter__())[first:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="file to save to and to resume from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ResumableSampler(Noisy())
    workers = {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(Noisy(), batch_size=16, sampler=sampler, **workers)

    step, steps_per_epoch = 0, len(loader)
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    while step < options.steps:
        sampler.set_epoch(step // steps_per_epoch)
        sampler.first = step % steps_per_epoch * loader.batch_size
        for inputs, targets in loader:
            step += 1
            loss = (model(inputs.to(device)).squeeze(1) - targets.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step} loss {loss.item() / world_size:.9e}", flush=True)
            if rank == 0 and step % options.save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, options.checkpoint + ".tmp")
                os.replace(options.checkpoint + ".tmp", options.checkpoint)
            if step == options.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
