"""Bytes that data parallelism really sends in a step, beside the formulas of ZeRO."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.options import Options
from bench.trainer.ours import Ours
from bench.trainer.shape import Shape

if TYPE_CHECKING:
    from bench.trainer.rank import Rank

STEPS = 3
SHAPE = Shape(layers=4, hidden=256, heads=4, seq_len=64, vocab_size=1024)


def run(rank: Rank, *, shape: dict[str, Any]) -> dict[str, Any]:
    """Bytes this rank sent to its replicas per step, and bytes of its parameters."""
    ours = Ours.on(rank, Shape(**shape))
    ours.step(0)
    before = ours.mesh.dp.bytes_sent
    for number in range(STEPS):
        ours.step(number + 1)
    sent = (ours.mesh.dp.bytes_sent - before) / STEPS
    return {"sent_bytes": sent, "parameter_bytes": 4 * ours.num_parameters}


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """A row per level and number of replicas; the claim is about the worst."""
    rows = []
    for replicas in (2, 4):
        for level in range(4):
            shape = options.sized(replace(SHAPE, dp=replicas, zero=level))
            row = run_ranks("zero", {"shape": shape.document()}, world_size=replicas)
            # Parameters are gathered twice at level 3, once before or after the update else.
            times = 3 if level == 3 else 2
            formula = times * row["parameter_bytes"] * (replicas - 1) / replicas
            row |= {"level": level, "replicas": replicas, "formula_bytes": formula}
            row["ratio"] = row["sent_bytes"] / formula
            print(
                f"ZeRO {level}, {replicas} replicas: {row['ratio']:.3f} of the formula", flush=True
            )
            rows.append(row)
    worst = max(rows, key=lambda row: row["ratio"])
    claim = Claim(
        claim="zero_bytes_vs_formula",
        value=worst["ratio"],
        unit="x",
        goal="<= 1.1",
        baseline="2 P (d-1)/d for levels 0 to 2, 3 P (d-1)/d for level 3 (arXiv 1910.02054, 7)",
        how=f"bytes counted where they are sent; worst: level {worst['level']}, "
        f"{worst['replicas']} replicas",
    )
    return rows, [claim]
