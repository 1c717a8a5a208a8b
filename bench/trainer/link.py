"""Overlap where it can be seen: two ranks in namespaces, a rate-limited link between them.

The rate is set so that what a rank sends in a step would take 0.5, 1 or 2 times as long as
the whole step takes where the link is free: its products, the update, and what gloo itself
costs. Beside the products alone, messages take somewhat longer than the ratio says.
"""

from __future__ import annotations

from typing import Any

from bench.results import Claim
from bench.trainer.launch import LimitedLink, run_ranks
from bench.trainer.options import Options, ratio_to_best
from bench.trainer.shape import Shape

# Wider than on loopback: a wide layer computes longer per byte, so that the rates stay
# below those at which the socket threads take the cores from the computation.
TENSOR = Shape(layers=4, hidden=1024, heads=16, batch=4, tp=2)
PIPELINE = Shape(pp=2, micro_batches=8)
RATIOS = (0.5, 1.0, 2.0)


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Rows of tp2 at each ratio and of pp2; claims at a ratio of 1."""
    rows = []
    with LimitedLink().laid() as place:
        for shape, ratios in ((TENSOR, RATIOS), (PIPELINE, (1.0,))):
            sized = options.sized(shape)
            free = _compare(sized, place, 1, baseline=False)
            sent_bytes, free_s = free["sent_bytes"], free["median_s"]["ours"]
            for ratio in ratios:
                rate = sent_bytes * 8 / (ratio * free_s) / 1e6
                place.limit(rate)
                row = _compare(sized, place, options.rounds, baseline=True)
                row |= {"messages_over_free_step": ratio, "megabits_per_s": rate}
                row["tokens_vs_native"] = ratio_to_best(row)
                print(f"{sized.name} at {rate:.0f} Mbit/s ({ratio}): "
                      f"{row['tokens_vs_native']:.3f}", row["median_s"], flush=True)  # fmt: skip
                rows.append(row)
            place.unlimit()
    even = [row for row in rows if row["messages_over_free_step"] == 1]
    tensor, pipeline = (
        next(row for row in even if row["shape"][axis] > 1) for axis in ("tp", "pp")
    )
    how = "two namespaces, veth and tbf, messages as long as a step of ours without a limit, "
    how += "median of paired steps"
    claims = [
        Claim(
            claim="tokens_vs_native_limited_link",
            value=tensor["tokens_vs_native"],
            unit="x",
            goal=">= 1.34",
            baseline="DTensor tp+sp, stock or with our reduce-scatter, whichever is faster",
            how=how,
        ),
        Claim(
            claim="pipeline_vs_native_limited_link",
            value=pipeline["tokens_vs_native"],
            unit="x",
            goal=">= 1.2",
            baseline="torch.distributed.pipelining Schedule1F1B",
            how=how,
        ),
    ]
    return rows, claims


def _compare(shape: Shape, place: LimitedLink, rounds: int, *, baseline: bool) -> dict[str, Any]:
    arguments = {"shape": shape.document(), "rounds": rounds, "baseline": baseline}
    found: dict[str, Any] = run_ranks("compare", arguments, world_size=2, place=place)
    return found
