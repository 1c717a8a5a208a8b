"""Fully sharded training (FSDP2) with checkpoints in host memory after each step.

Each rank keeps its own shards; another number of ranks can go on from storage.

torchrun --nproc-per-node 2 fsdp2_session.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from outlast import session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    hidden = options.hidden
    model = nn.Sequential(
        *(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()),
        nn.Linear(hidden, 1),
    ).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = session.checkpoint(model=model, optimizer=optimizer)

    for step in range(checkpoint.restore() + 1, options.steps + 1):
        # The batch of a step does not depend on the number of ranks, nor on when it is done.
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(48, 64, generator=generator).chunk(world_size)[rank].to(device)
        loss = (model(inputs).squeeze(1) - inputs.sin().sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        session.step(step, loss=loss.item() / world_size, tokens=48)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world_size:.9e}", flush=True)
        checkpoint.save(step)
        if session.should_stop():
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
