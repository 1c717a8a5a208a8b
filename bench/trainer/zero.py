"""Bytes that data parallelism really sends in a step, beside the formulas of ZeRO."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.options import Options
from bench.trainer.ours import Ours
from bench.trainer.shape import Shape

if TYPE_CHECKING:
    from bench.member import Rank

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
    for replicas, level, micro_batches in product((2, 4), range(4), (1, 2)):
        shape = replace(SHAPE, dp=replicas, zero=level, micro_batches=micro_batches)
        row = run_ranks("zero", {"shape": options.sized(shape).document()}, world_size=replicas)
        times = _times(level, micro_batches)
        formula = times * row["parameter_bytes"] * (replicas - 1) / replicas
        row |= {"level": level, "replicas": replicas, "micro_batches": micro_batches}
        row |= {"formula_bytes": formula, "ratio": row["sent_bytes"] / formula}
        print(
            f"ZeRO {level}, {replicas} replicas, {micro_batches} micro-batches: "
            f"{row['ratio']:.3f} of the formula",
            flush=True,
        )
        rows.append(row)
    worst = max(rows, key=lambda row: row["ratio"])
    claim = Claim(
        claim="zero_bytes_vs_formula",
        value=worst["ratio"],
        unit="x",
        goal="<= 1.1",
        baseline="P (d-1)/d times 2 for levels 0 and 1, m + 1 for level 2, 3 m for level 3, with m "
        "micro-batches (arXiv 1910.02054, 7)",
        how=f"bytes counted where they are sent; worst: level {worst['level']}, "
        f"{worst['replicas']} replicas, {worst['micro_batches']} micro-batches",
    )
    return rows, [claim]


def _times(level: int, micro_batches: int) -> int:
    """How often a step sends all parameters, or all gradients.

    Without a pipeline levels 2 and 3 reduce after each micro-batch, and level 3 gathers for
    each forward and each backward pass; else parameters go round once, beside the update.
    """
    if level == 3:
        return 3 * micro_batches
    return micro_batches + 1 if level == 2 else 2
