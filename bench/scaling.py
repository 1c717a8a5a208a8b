"""Weak and strong scaling over the layouts that a machine has cores for.

Strong: the same global batch on more ranks. Weak: as much batch for each rank.
Efficiency is speed over that of one rank times the number of ranks, each rank pinned
to a core of its own with one thread; more ranks than cores are not measured.

    python -m bench.scaling [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from bench.results import Claim, write
from bench.trainer.launch import run_ranks
from bench.trainer.shape import Shape

AXES = ("dp", "tp", "pp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the program only")
    options = parser.parse_args()
    base = Shape(batch=4)
    if options.small:
        base = base.smaller()
    rows = measure(base, options.rounds, cores=len(os.sched_getaffinity(0)))
    write("scaling-part" if options.small else "scaling", rows, _claims(rows))


def measure(base: Shape, rounds: int, *, cores: int) -> list[dict[str, Any]]:
    """A row per layout and kind, with its efficiency."""
    alone = _tokens_per_s(base, rounds)
    rows = [{"kind": "one rank", "layout": base.name, "tokens_per_s": alone}]
    size = 2
    while size <= cores:
        for axis in AXES:
            changes: dict[str, Any] = {axis: size}
            layout = replace(base, micro_batches=4 if axis == "pp" else 1, **changes)
            for kind, batch in (("strong", base.batch), ("weak", base.batch * size)):
                shape = replace(layout, batch=batch)
                found = _tokens_per_s(shape, rounds)
                rows.append(
                    {
                        "kind": kind,
                        "layout": shape.name,
                        "tokens_per_s": found,
                        "efficiency": found / (alone * size),
                    }
                )
                print(f"{kind} {shape.name}: {rows[-1]['efficiency']:.2f}", flush=True)
        size *= 2
    return rows


def _tokens_per_s(shape: Shape, rounds: int) -> float:
    arguments = {"shape": shape.document(), "rounds": rounds, "baseline": False}
    found = run_ranks("compare", arguments, world_size=shape.world_size)
    return float(shape.tokens / found["median_s"]["ours"])


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for kind in ("weak", "strong"):
        found = [row for row in rows if row["kind"] == kind]
        if not found:
            continue
        worst = min(found, key=lambda row: row["efficiency"])
        claims.append(
            Claim(
                claim=f"{kind}_scaling_efficiency_worst",
                value=worst["efficiency"],
                unit="x",
                goal="reported",
                baseline="one rank of the same trainer on the same machine",
                how=f"loopback, medians; worst layout: {worst['layout']}",
            )
        )
    return claims


if __name__ == "__main__":
    main()
