"""torchft: groups of ranks that average their gradients with those groups that live.

Each group is a job. One that is killed comes back by itself, and gets the newest weights from a
group that went on.

torchft_lighthouse --min_replicas 1
REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://localhost:29510 \\
    torchrun --standalone torchft_session.py
"""

import argparse
import os
from datetime import timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)

from outlast import session


class Sines(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sin().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    group = int(os.environ["REPLICA_GROUP_ID"])

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1)]
    model = nn.Sequential(*layers).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state_dict() -> dict:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=(ProcessGroupNCCL if has_gpu else ProcessGroupGloo)(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=30),
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    sampler = DistributedSampler(
        Sines(),
        replica_rank=group,
        num_replica_groups=int(os.environ["NUM_REPLICA_GROUPS"]),
        group_rank=0,
        num_replicas=1,
    )
    loader = DataLoader(Sines(), batch_size=16, sampler=sampler)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = (replicated(inputs.to(device)).squeeze(1) - targets.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            step = manager.current_step()
            session.step(step, loss=loss.item())
            num_groups = manager.num_participants()
            print(f"step {step} loss {loss.item():.6e} groups {num_groups}", flush=True)
            if step >= options.steps:
                manager.shutdown()
                return


if __name__ == "__main__":
    main()
