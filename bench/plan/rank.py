"""What one rank does: `python -m bench.plan.rank TASK ARGUMENTS`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # a re-export

from bench.member import Rank, serve
from bench.plan.layouts import layouts, name_of
from bench.plan.quota import enter
from bench.trainer.ours import Ours

_MESSAGE_BYTES = 4 << 20
_ROUNDS = 5
_LAYERS = 50


def steps(rank: Rank, *, groups: list[str], rounds: int, small: bool) -> dict[str, Any]:
    """The speed of a rank and of its messages, and how long a step of each layout takes."""
    enter(Path(groups[rank.rank]))
    machine = {
        "flops_per_s": _flops_per_s(rank),
        "bytes_per_s": _bytes_per_s(rank),
        "latency_s": _latency_s(rank),
    }
    rows = []
    for number, spec in enumerate(layouts(small=small)):
        folder = rank.folder / f"{number}-{rank.rank}"
        folder.mkdir()
        # Text that is prepared once for all.
        data = rank.folder / "data"
        data.mkdir(exist_ok=True)
        (folder / "data").symlink_to(data)
        store = PrefixStore(f"layout-{number}/", rank.store)
        ours = Ours(spec, rank=rank.rank, store=store, folder=folder, interface=rank.interface)
        # The first step allocates and connects.
        took = [rank.timed(lambda: ours.step(0)) for _ in range(rounds + 1)][1:]  # noqa: B023
        ours.mesh.disconnect()
        rows.append({"layout": name_of(spec), "step_s": took})
        if rank.rank == 0:
            print(f"{name_of(spec)}: {statistics.median(took):.2f} s", flush=True)
    return {"machine": machine, "rows": rows}


def _flops_per_s(rank: Rank) -> float:
    """Of a product as large as those of a layer, all ranks at once."""
    left, right = torch.randn(256, 256), torch.randn(256, 1024)

    def product() -> None:
        for _ in range(100):
            torch.mm(left, right)

    product()
    took_s = statistics.median(rank.timed(product) for _ in range(_ROUNDS))
    return 100 * 2 * 256 * 256 * 1024 / took_s


def _bytes_per_s(rank: Rank) -> float:
    """Of messages that neighbours send each other, all pairs at once."""
    message = torch.zeros(_MESSAGE_BYTES // 4)
    peer = rank.rank ^ 1

    def exchange() -> None:
        got = torch.empty_like(message)
        pending = [dist.isend(message, peer), dist.irecv(got, peer)]
        for each in pending:
            assert each is not None, "both are in the group"
            each.wait()

    exchange()
    took_s = statistics.median(rank.timed(exchange) for _ in range(_ROUNDS))
    return _MESSAGE_BYTES / took_s


def _latency_s(rank: Rank) -> float:
    """Of small sums between the products of a layer, as tensor groups have them: what they add."""
    left, right = torch.randn(256, 256), torch.randn(256, 1024)
    number = torch.zeros(1)

    def layers(*, sums: bool) -> None:
        for _ in range(_LAYERS):
            torch.mm(left, right)
            if sums:
                dist.all_reduce(number)

    layers(sums=True)
    alone_s, both_s = (
        statistics.median(rank.timed(partial(layers, sums=sums)) for _ in range(_ROUNDS))
        for sums in (False, True)
    )
    return max(0.0, both_s - alone_s) / _LAYERS


TASKS: Mapping[str, Callable[..., Any]] = {"steps": steps}

if __name__ == "__main__":
    serve(TASKS, pinned=False)
