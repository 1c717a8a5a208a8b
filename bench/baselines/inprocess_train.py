"""Training under NVIDIA's restart inside the process: DDP over gloo, a checkpoint every step.

Two processes train and a third one waits; model and optimizer are built once and outlive
restarts. Needs the package nvidia-resiliency-ext.
"""

# No `from __future__ import annotations` here: the wrapper looks for a parameter of its own
# class, and a class it must be.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from bench.baselines.dense import Training, note, read_spec

NUM_ACTIVE = 2

_TENTH = timedelta(seconds=0.1)
_FASTEST = {
    "monitor_thread_interval": _TENTH,
    "monitor_process_interval": _TENTH,
    "heartbeat_interval": 2 * _TENTH,
    "progress_watchdog_interval": 2 * _TENTH,
    "soft_timeout": timedelta(seconds=3),
    "hard_timeout": timedelta(seconds=5),
    "heartbeat_timeout": timedelta(seconds=5),
    "last_call_wait": _TENTH,
    "termination_grace_time": timedelta(seconds=0.5),
}


def train(
    store: TCPStore,
    training: Training,
    call_wrapper: inprocess.CallWrapper = None,  # the wrapper fills it in
) -> None:
    """Called again after each failure, with the ranks that are left."""
    attempt = call_wrapper.iteration
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note("entered", rank=rank, attempt=attempt)
    own = PrefixStore(str(attempt), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
    note("groups", rank=rank, attempt=attempt)
    wrapped = DistributedDataParallel(training.model)
    first = training.load()
    note("restored", rank=rank, attempt=attempt, step=first)
    for step in range(first + 1, read_spec().steps + 1):
        training.step(wrapped, step, rank, world_size)
        note("step", rank=rank, attempt=attempt, step=step)
        if rank == 0:
            with call_wrapper.atomic():
                training.save(step)


def main() -> None:
    torch.set_num_threads(1)
    port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    training = Training(read_spec())
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        port + 1,
        int(os.environ["WORLD_SIZE"]),
        rank == 0,
        multi_tenant=True,
    )
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 2},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(NUM_ACTIVE),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        **(_FASTEST if os.environ["FASTEST"] == "1" else {}),
    )
    wrapper(train)(store, training)


if __name__ == "__main__":
    main()
