"""One seed from beginning to end: `python -m tests.sim.run --seed N [--trace]`.

Safety phase: half a virtual day of faults with every checker on. Liveness phase:
faults stop, people put things right, and every job must end with a reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from random import Random

from tests.sim.faults import SAFETY_S, draw_shape, end_faults, plan_faults
from tests.sim.timeline import EPOCH_S
from tests.sim.world import World

# Jobs take eleven hours at most, and lose some of it to every fault.
LIVENESS_S = 48 * 3600.0
# Quarantines that wait for a node are given up after two hours.
SETTLE_S = 3 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a seed did."""

    seed: int
    num_nodes: int
    num_events: int
    num_facts: int
    hours: float
    faults: tuple[str, ...]
    jobs: dict[str, str]
    seen: dict[str, int]


def run_seed(seed: int, *, trace: bool = False) -> Outcome:
    """Run a seed.

    Raises:
        Violation: an invariant does not hold. Any other exception is one, too.
    """
    world = World(seed, draw_shape(Random(f"shape {seed}")), trace=trace)
    try:
        faults = plan_faults(world)
        world.timeline.run_until(EPOCH_S + SAFETY_S)
        end_faults(world)
        deadline_s = world.now_s + LIVENESS_S
        while not world.all_finished and world.now_s < deadline_s:
            world.timeline.run_until(world.now_s + 600.0)
        world.timeline.run_until(world.now_s + SETTLE_S)
        machine = world.controller.machine
        assert machine is not None
        world.checkers.finished(machine.state)
    except Exception as error:
        error.add_note(f"replay: python -m tests.sim.run --seed {seed} --trace")
        raise
    jobs = {job.job_id: f"{job.state}: {job.reason}" for job in machine.state.jobs.values()}
    return Outcome(
        seed=seed,
        num_nodes=len(world.nodes),
        num_events=world.timeline.num_run,
        num_facts=len(world.controller.journal),
        hours=world.hours,
        faults=tuple(faults),
        jobs=jobs,
        seen=world.tracer.seen,
    )


def main() -> int:
    """Run seeds and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="run this many seeds from --seed on")
    parser.add_argument("--trace", action="store_true", help="one line per event")
    arguments = parser.parse_args()
    failures = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        begun_s = time.perf_counter()
        try:
            outcome = run_seed(seed, trace=arguments.trace)
        except Exception as error:
            if arguments.count == 1:
                raise
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            continue
        took_s = time.perf_counter() - begun_s
        print(
            f"seed {seed}: {outcome.num_nodes} nodes, {outcome.hours:.0f} h, "
            f"{len(outcome.faults)} faults, {outcome.num_events} events, "
            f"{outcome.num_facts} facts, {took_s:.2f} s"
        )
        for job, end in outcome.jobs.items():
            print(f"  {job}: {end}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
