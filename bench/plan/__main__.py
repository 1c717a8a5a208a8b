"""How well projections order layouts: `make bench-plan`. Needs root, for control groups.

Every layout that eight ranks can have of one small model trains some steps, each rank on a quarter
of a core of its own, and is projected on a machine with the speed that such a rank was measured
to have. The claim is Spearman's correlation of projected and measured times: whether the layout
that `outlast plan --search` puts first is the fastest, not how many seconds it takes.

    python -m bench.plan [--rounds 3] [--small]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

from bench.plan.layouts import RANKS, layouts
from bench.plan.quota import groups
from bench.results import Claim, write
from bench.trainer.launch import run_ranks
from outlast.sizing.of_spec import plan_input
from trainer.core.projection import Machine, project

_TIMEOUT_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each layout")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the program only")
    given = parser.parse_args()
    share = len(os.sched_getaffinity(0)) / RANKS
    with groups(RANKS, share) as folders:
        found = run_ranks(
            "steps",
            {
                "groups": [str(folder) for folder in folders],
                "rounds": given.rounds,
                "small": given.small,
            },
            world_size=RANKS,
            program="bench.plan.rank",
            timeout_s=_TIMEOUT_S,
        )
    rows = _projected(found, small=given.small)
    write("plan-part" if given.small else "plan", rows, [_claim(rows)])


def _projected(found: dict[str, Any], *, small: bool) -> list[dict[str, Any]]:
    """The measured rows with what was projected for them, shortest measured first."""
    speed = found["machine"]
    machine = Machine(
        peak_flops_per_s=speed["flops_per_s"],
        kernel_share=1.0,
        peer_bytes_per_s=speed["bytes_per_s"],
        link_bytes_per_s=speed["bytes_per_s"],
        ranks_per_node=RANKS,
        latency_s=speed["latency_s"],
    )
    rows = [
        {
            **row,
            "median_s": statistics.median(row["step_s"]),
            "projected_s": project(plan_input(spec), machine).step_s,
        }
        for row, spec in zip(found["rows"], layouts(small=small), strict=True)
    ]
    rows.sort(key=lambda row: float(row["median_s"]))
    for row in rows:
        print(f"{row['median_s']:7.2f} s, projected {row['projected_s']:7.2f} s: {row['layout']}")
    return [{"part": "machine", **speed}, *rows]


def _claim(rows: Sequence[dict[str, Any]]) -> Claim:
    measured = [row for row in rows if "median_s" in row]
    found = spearman(
        [row["median_s"] for row in measured], [row["projected_s"] for row in measured]
    )
    return Claim(
        claim="projected_and_measured_order",
        value=found,
        unit="Spearman's rho",
        goal=">= 0.8",
        baseline="the same layouts measured",
        how=f"{len(measured)} layouts of {RANKS} ranks, each on its share of the cores; median of "
        "the steps of each",
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks; no two numbers of a sequence are taken to be equal."""
    return statistics.correlation(_places(one), _places(other))


def _places(numbers: Sequence[float]) -> list[int]:
    ordered = sorted(numbers)
    return [ordered.index(number) for number in numbers]


if __name__ == "__main__":
    main()
