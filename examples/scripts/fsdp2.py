"""Fully sharded training (FSDP2) with torch.distributed.checkpoint, as one writes it for torchrun.

torchrun --nproc-per-node 2 fsdp2.py --checkpoints /tmp/fsdp2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a folder, which has its name once all ranks have written their part."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    unfinished = folder / f"unfinished-{step}"
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest folder, if there is one; its step, or 0."""
    step = max((int(path.name.partition("-")[2]) for path in folder.glob("step-*")), default=0)
    if step:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / f"step-{step}")
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    blocks = [Block(64) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1)).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(load(options.checkpoints, model, optimizer) + 1, options.steps + 1):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(inputs).squeeze(1) - inputs.sin().sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world_size:.9e}", flush=True)
        if step % options.save_every == 0:
            save(options.checkpoints, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
