"""Tokens per second on every layout, all ranks on one machine's loopback."""

from __future__ import annotations

from typing import Any

from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.options import Options, ratio_to_best
from bench.trainer.shape import Shape

LAYOUTS = (
    Shape(),
    Shape(dp=2),
    Shape(dp=2, zero=3),
    Shape(tp=2),
    Shape(pp=2, micro_batches=8),
    Shape(tp=2, pp=2, micro_batches=8),
    Shape(tp=2, pp=2, dp=2, micro_batches=4, zero=2),
)


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """A row per layout; the claim is about the worst one."""
    rows = []
    for layout in LAYOUTS:
        shape = options.sized(layout)
        arguments = {"shape": shape.document(), "rounds": options.rounds, "baseline": True}
        row = run_ranks("compare", arguments, world_size=shape.world_size)
        row["tokens_vs_native"] = ratio_to_best(row)
        row["tokens_per_s"] = {name: shape.tokens / s for name, s in row["median_s"].items()}
        print(f"{shape.name}: {row['tokens_vs_native']:.3f} of native", row["median_s"], flush=True)
        rows.append(row)
    worst = min(rows, key=lambda row: row["tokens_vs_native"])
    claim = Claim(
        claim="tokens_vs_native_worst",
        value=worst["tokens_vs_native"],
        unit="x",
        goal=">= 0.97",
        baseline="DTensor tp+sp, torch pipelining, FSDP2 or DDP; stock or with our reduce-scatter, "
        "whichever is faster",
        how=f"median of paired steps, loopback, worst layout: {worst['layout']}",
    )
    return rows, [claim]
