"""Data-parallel training as one writes it for torchrun: nothing here knows of Outlast.

torchrun --nproc-per-node 2 ddp.py --checkpoint /tmp/ddp.pt
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="file to save to and to resume from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
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
    layers = [nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(hidden, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first_step = 1
    if os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_step = saved["step"] + 1

    for step in range(first_step, options.steps + 1):
        # The batch of a step is the same whenever it is done.
        generator = torch.Generator().manual_seed(step * world_size + rank)
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(inputs).squeeze(1) - inputs.sin().sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world_size:.9e}", flush=True)
        if rank == 0 and step % options.save_every == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, options.checkpoint + ".tmp")
            os.replace(options.checkpoint + ".tmp", options.checkpoint)
        # Nobody runs ahead of a checkpoint that is being written.
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
