"""What one rank of a benchmark does: `python -m bench.trainer.rank TASK ARGUMENTS`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from bench.baselines.exchange import exchanged_reduce_scatter
from bench.baselines.native import Native
from bench.member import Rank, serve
from bench.trainer import bubble, context, experts, overlap, window, zero
from bench.trainer.ours import Ours
from bench.trainer.shape import Shape


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
        for name, (contender, around) in contenders.items():
            with around():
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
    "context": context.run,
    "experts": experts.run,
    "overlap": overlap.run,
    "window": window.run,
    "zero": zero.run,
}


if __name__ == "__main__":
    serve(TASKS, pinned=True)
