"""What one rank of a benchmark does: `python -m bench.trainer.rank TASK ARGUMENTS`."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # a re-export

from bench.baselines.exchange import exchanged_reduce_scatter
from bench.baselines.native import Native
from bench.trainer import bubble, overlap, window, zero
from bench.trainer.ours import Ours
from bench.trainer.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Who this process is, and how it reaches the others."""

    rank: int
    world_size: int
    store: TCPStore
    folder: Path
    interface: str

    @classmethod
    def join(cls) -> Rank:
        """As the launcher's environment says; pinned to a core, one thread."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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


class Contender(Protocol):
    """One side of a comparison."""

    def step(self, number: int) -> None: ...


def compare(rank: Rank, *, shape: Mapping[str, Any], rounds: int, baseline: bool) -> dict[str, Any]:
    """Step times of ours and of both forms of the baseline, one step of each in turn."""
    wanted = Shape(**shape)
    ours = Ours.on(rank, wanted)
    contenders: dict[str, tuple[Contender, Callable[[], AbstractContextManager[None]]]]
    contenders = {"ours": (ours, nullcontext)}
    if baseline:
        native = Native(wanted)
        contenders["native"] = (native, nullcontext)
        if rank.world_size > 1:
            contenders["native_exchange"] = (native, exchanged_reduce_scatter)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    sent_before = 0
    for number in range(rounds + 1):
        if number == 1:
            sent_before = ours.bytes_sent
        for name, (contender, context) in contenders.items():
            with context():
                took_s = rank.timed(lambda: contender.step(number))  # noqa: B023  # used at once
            # The first step allocates and connects.
            if number > 0:
                times[name].append(took_s)
    return {
        "layout": wanted.name,
        "shape": wanted.document(),
        "step_s": times,
        "sent_bytes": (ours.bytes_sent - sent_before) / rounds,
        "median_s": {name: statistics.median(found) for name, found in times.items()},
    }


TASKS: Mapping[str, Callable[..., Any]] = {
    "compare": compare,
    "bubble": bubble.run,
    "overlap": overlap.run,
    "window": window.run,
    "zero": zero.run,
}


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    rank = Rank.join()
    result = TASKS[name](rank, **arguments)
    if rank.rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    # Leaving in an orderly way aborts now and then: gloo's threads outlive their objects.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
