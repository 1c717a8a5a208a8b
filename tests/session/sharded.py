"""A script of the tests: an FSDP2 model, an optimizer and things that each rank has its own.

`sharded.py STEPS`: restore, train to that step, save each step; prints what it ended with.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from outlast import session


class Own:
    """What a loader or a logger may keep: a little of everything."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"rank": rank, "seen": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sums = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sums.update(whole.detach().contiguous().numpy().tobytes())
    return sums.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    random.seed(rank)
    np.random.seed(rank)
    # 33 rows: no number of ranks divides them.
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    own = Own(rank)
    checkpoint = session.checkpoint(model=model, optimizer=optimizer, schedule=scheduler, own=own)
    resumed = checkpoint.restore()
    for step in range(resumed + 1, int(sys.argv[1]) + 1):
        generator = torch.Generator().manual_seed(step)
        with session.box("data"):
            inputs = torch.randn(12, 7, generator=generator).chunk(world_size)[rank]
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        own.state |= {
            "seen": step,
            "array": np.arange(step),
            "tensor": torch.full((2,), float(rank)),
            "tuple": (1, None, b"\\0\\1", float("inf")),
            "set": {1, 2},
        }
        session.step(step, loss=loss.item())
        checkpoint.save(step)
    facts = {
        "resumed": resumed,
        "model": digest(dict(model.state_dict())),
        "moments": digest(
            {
                f"{index}{name}": value
                for index, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()
            }
        ),
        "rate": scheduler.get_last_lr(),
        "own": repr(sorted(own.state.items())),
        "random": [random.random(), float(np.random.rand()), float(torch.rand(1))],
    }
    dist.barrier()
    print(json.dumps(facts), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
