"""Tokens per second of a mixture of experts: on one rank, and on two that divide its experts.

Beside both, two ranks that each have all experts and sum their gradients. Steps of all three
take turns in the same processes; while one rank trains alone the other one waits.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.options import Options
from bench.trainer.ours import STEPS, Ours
from bench.trainer.shape import Shape

if TYPE_CHECKING:
    from bench.member import Rank

SHAPE = Shape(layers=4, hidden=256, heads=4, seq_len=256, vocab_size=1024, experts=8)
LAYOUTS: dict[str, dict[str, Any]] = {"one_rank": {}, "ep2": {"dp": 2, "ep": 2}, "dp2": {"dp": 2}}


def run(rank: Rank, *, shape: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds of each layout's steps, and the seconds of a processor that rank 0 spends in one."""
    contenders: dict[str, Ours | None] = {}
    for name, layout in LAYOUTS.items():
        wanted = replace(Shape(**shape), **layout)
        own = replace(rank, folder=rank.folder / name)
        own.folder.mkdir(exist_ok=True)
        if wanted.world_size > 1:
            contenders[name] = Ours.on(own, wanted)
        else:
            alone = Ours(wanted.spec(steps=STEPS), folder=own.folder) if rank.rank == 0 else None
            contenders[name] = alone
    times: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, ours in contenders.items():
            began_s = time.process_time()
            took_s = rank.timed(lambda: None if ours is None else ours.step(number))  # noqa: B023  # used at once
            # The first step allocates and connects.
            if number > 0:
                times[name].append(took_s)
                cpu[name].append(time.process_time() - began_s)
    return {"shape": shape, "step_s": times, "cpu_s": cpu}


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """One row; claims beside one rank, and beside replicas with all experts."""
    shape = options.sized(SHAPE)
    arguments = {"shape": shape.document(), "rounds": options.rounds}
    row = run_ranks("experts", arguments, world_size=2)
    steps = row["step_s"]
    row["tokens_per_s"] = {
        name: shape.tokens / statistics.median(found) for name, found in steps.items()
    }
    row["median_cpu_s"] = {name: statistics.median(found) for name, found in row["cpu_s"].items()}
    print("experts: tokens per second", row["tokens_per_s"], flush=True)
    print("experts: processor seconds of a rank's step", row["median_cpu_s"], flush=True)
    how = f"{shape.tokens} tokens a step, {shape.experts} experts, 2 for each token, 4 layers, fp32"
    claims = [
        Claim(
            claim=f"experts_ep2_vs_{other}",
            value=statistics.median(
                before / now for before, now in zip(steps[other], steps["ep2"], strict=True)
            ),
            unit="x",
            goal=goal,
            baseline=baseline,
            how=f"{how}; medians of paired steps",
        )
        for other, goal, baseline in (
            ("one_rank", "> 1", "the same model and batch on one rank"),
            ("dp2", ">= 1", "two replicas that each have all experts"),
        )
    ]
    return [row], claims
