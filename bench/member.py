"""One of a benchmark's ranks: who it is, how it reaches the others, and what it was asked to do."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # a re-export

# Below the folder of the ranks: libraries write what they like to standard output.
RESULT_FILE = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Who this process is, and how it reaches the others."""

    rank: int
    world_size: int
    store: TCPStore
    folder: Path
    interface: str

    @classmethod
    def join(cls, *, pinned: bool) -> Rank:
        """As the launcher's environment says; one thread, which keeps to a core if `pinned`."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if pinned:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=300),
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            store=store,
            folder=Path(os.environ["OUTLAST_BENCH_FOLDER"]),
            interface=os.environ["GLOO_SOCKET_IFNAME"],
        )

    def sum(self, value: float) -> float:
        """Over all ranks."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def slowest(self, seconds: float) -> float:
        """The longest time over all ranks."""
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds that `work` takes on the slowest rank, all starting together."""
        dist.barrier()
        begin_s = time.perf_counter()
        work()
        return self.slowest(time.perf_counter() - begin_s)


def serve(tasks: Mapping[str, Callable[..., Any]], *, pinned: bool) -> None:
    """Do the task of the command line; what rank 0 makes of it is kept. Does not return."""
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    rank = Rank.join(pinned=pinned)
    result = tasks[name](rank, **arguments)
    if rank.rank == 0:
        (rank.folder / RESULT_FILE).write_text(json.dumps(result))
    dist.barrier()
    # Leaving in an orderly way aborts now and then: gloo's threads outlive their objects.
    sys.stdout.flush()
    os._exit(0)
