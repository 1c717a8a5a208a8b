"""From SIGKILL of one of several ranks to the next step of all, with and without `recovery.heal`.

The same job on the same controller and nodes, interleaved: without, every process is made anew;
with it, the ranks that live leave the attempt and join the next one.

    python -m bench.healing [--runs 5] [--nodes 4] [--workers 2]
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.recovery.ours import controller, strike
from bench.recovery.setting import SPEC
from bench.results import Claim, write

_HOW = "python -m bench.healing; paired, interleaved SIGKILL of rank 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    # Whoever ends this ends all that it has started, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    num_ranks = given.nodes * given.workers
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        state_dir = Path(name) / "state"
        with controller(state_dir, nodes=given.nodes, workers=given.workers) as client:
            for run in range(given.runs):
                for heals in (False, True):
                    row = strike(
                        client,
                        state_dir,
                        2 * run + heals,
                        signal.SIGKILL,
                        spec=_spec(num_ranks, given.workers, heals=heals),
                        num_ranks=num_ranks,
                    )
                    rows.append({"run": run, "heals": heals, "ranks": num_ranks, **row})
                    kind = "healed" if heals else "restarted"
                    print(
                        f"run {run}: {kind} in {row['recovery_s']:.3f} s, {row['ranks_made_anew']} "
                        f"processes made anew  {row['split_s']}",
                        flush=True,
                    )
    _report(rows, num_ranks)


def _spec(num_ranks: int, workers: int, *, heals: bool) -> dict[str, Any]:
    """As `bench.recovery` has it, with one micro-batch for each rank."""
    return {
        **SPEC,
        "model": {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64},
        "parallel": {"dp": num_ranks, "micro_batch": 1},
        "data": {"global_batch": num_ranks, "max_bytes": 2**20},
        "resources": {"workers_per_node": workers},
        "recovery": {"heal": heals, "preflight": False},
    }


def _report(rows: list[dict[str, Any]], num_ranks: int) -> None:
    restarted, healed = ([row for row in rows if row["heals"] is heals] for heals in (False, True))
    for kind, found in (("restarted", restarted), ("healed", healed)):
        print(f"{kind}: median {_median(found, _whole):.3f} s")
        for part in found[0]["split_s"]:
            value = statistics.median(row["split_s"][part] for row in found)
            print(f"  {part:<12} {value:.3f} s")
    baseline = f"the same job, all processes made anew: median {_median(restarted, _whole):.3f} s"
    figures = (
        ("restart_vs_heal_whole", _ratio(restarted, healed, _whole), "x", "reported"),
        ("restart_vs_heal", _ratio(restarted, healed, _before_first_step), "x", ">= 1.7"),
        ("survivors_restarted", max(row["ranks_made_anew"] for row in healed) - 1, "ranks", "0"),
        ("steps_lost", max(row["steps_redone"] for row in healed), "steps", "<= 1"),
    )
    claims = [
        Claim(claim=claim, value=value, unit=unit, goal=goal, baseline=baseline, how=_HOW)
        for claim, value, unit, goal in figures
    ]
    write(f"healing-{num_ranks}", rows, claims)


def _whole(row: dict[str, Any]) -> float:
    return float(row["recovery_s"])


def _before_first_step(row: dict[str, Any]) -> float:
    return float(row["recovery_s"] - row["split_s"]["first_step"])


def _median(rows: list[dict[str, Any]], of: Any) -> float:
    return statistics.median(of(row) for row in rows)


def _ratio(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], of: Any) -> float:
    pairs = zip(theirs, ours, strict=True)
    return statistics.median(of(their) / of(our) for their, our in pairs)


if __name__ == "__main__":
    main()
