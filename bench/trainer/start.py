"""Creation of all groups of a 3D layout, first use included, beside torch's two ways."""

from __future__ import annotations

import statistics
from typing import Any

from bench.results import Claim
from bench.trainer import groups
from bench.trainer.options import Options

GOALS = {"new_group": 1.8, "device_mesh": 2.3}


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """Claims at 64 ranks; 128 ranks are reported."""
    worlds = (8,) if options.small else (64, 128)
    rows = []
    for world_size in worlds:
        times: dict[str, list[float]] = {name: [] for name in groups.VARIANTS}
        for _ in range(options.rounds if world_size == worlds[0] else 1):
            for name, found in times.items():
                found.append(groups.measure(world_size, name))
        row: dict[str, Any] = {"world_size": world_size, "seconds": times}
        print(f"groups of {world_size} ranks:", times, flush=True)
        rows.append(row)
    claims = [
        Claim(
            claim=f"group_creation_vs_{name}",
            value=_ratio(rows[0]["seconds"], name),
            unit="x",
            goal=f">= {goal}",
            baseline=f"torch's {name} with all ranks forked from a warm process",
            how=f"{worlds[0]} ranks, all tp, dp and pp groups, first all-reduce included",
        )
        for name, goal in GOALS.items()
    ]
    return rows, claims


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    pairs = zip(seconds[name], seconds["ours"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)
