"""The same as ddp_session.py, in processes that live on when a peer is lost (recovery.heal).

Under plain Python or torchrun `train` is called once.

torchrun --nproc-per-node 2 ddp_healing.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast import session


def train(options: argparse.Namespace, device: torch.device) -> None:
    """One attempt: all that belongs to its process group is made here."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    hidden = options.hidden
    layers = [nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(hidden, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = session.checkpoint(model=model, optimizer=optimizer)

    for step in range(checkpoint.restore() + 1, options.steps + 1):
        # The random numbers go on where they were, on each rank its own.
        inputs = torch.randn(32, 64).to(device) + 0.01 * rank
        loss = (model(inputs).squeeze(1) - inputs.sin().sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        session.step(step, loss=loss.item() / world_size, tokens=32 * world_size)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world_size:.9e}", flush=True)
        checkpoint.save(step)
        if session.should_stop():
            break

    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()

    # What costs seconds and needs no peer is done once: imports, the device, data.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    session.healing(lambda: train(options, device))


if __name__ == "__main__":
    main()
