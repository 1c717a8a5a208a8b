"""One seed from beginning to end: `python -m controller.sim.run --seed N [--trace]`.

Safety phase: a virtual day of faults with every checker on. Liveness phase:
faults stop, people put things right, and every job must end with a reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random

from controller.sim.faults import SAFETY_S, end_faults, plan_faults
from controller.sim.shapes import draw_shape
from controller.sim.shrink import shrink
from controller.sim.timeline import EPOCH_S
from controller.sim.world import World
from outlast.ids import JobId

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
    jobs: dict[JobId, str]
    seen: dict[str, int]


def run_seed(seed: int, *, only: tuple[int, ...] | None = None, trace: bool = False) -> Outcome:
    """Run a seed, or with some of its faults only.

    Raises:
        Violation: an invariant does not hold. Any other exception is one, too.
    """
    world = World(seed, draw_shape(Random(f"shape {seed}")), trace=trace)
    try:
        faults = plan_faults(world, only)
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
        error.add_note(f"replay: {replay_line(seed, only)}")
        raise
    jobs = {job.job_id: f"{job.state}: {job.reason}" for job in machine.state.jobs.values()}
    return Outcome(
        seed=seed,
        num_nodes=len(world.nodes),
        num_events=world.timeline.num_run,
        num_facts=world.controller.journal.num_facts,
        hours=world.hours,
        faults=tuple(faults),
        jobs=jobs,
        seen=world.tracer.seen,
    )


def replay_line(seed: int, only: tuple[int, ...] | None = None) -> str:
    """What shows a run again, line by line."""
    faults = "" if only is None else f" --only {','.join(map(str, only)) or 'none'}"
    return f"python -m controller.sim.run --seed {seed}{faults} --trace"


def shrunk(seed: int, error: Exception) -> tuple[int, ...]:
    """The faults that it takes for a failing seed to fail in the same way."""
    told = _kind_of(error)

    def fails(only: tuple[int, ...]) -> bool:
        try:
            run_seed(seed, only=only)
        except Exception as again:  # noqa: BLE001  # whatever it is, it is compared
            return _kind_of(again) == told
        return False

    world = World(seed, draw_shape(Random(f"shape {seed}")))
    return shrink(tuple(range(len(plan_faults(world)))), fails)


def _kind_of(error: Exception) -> str:
    """What broke, without when and where."""
    return f"{type(error).__name__} {str(error).split(' at ')[0]}"


def _only(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(number) for number in text.split(","))


def main() -> int:
    """Run seeds and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="run this many seeds from --seed on")
    parser.add_argument("--trace", action="store_true", help="one line per event")
    parser.add_argument("--only", type=_only, help="strike with these faults only, as 3,7")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="only failures, and a summary")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if len(seeds) == 1:
        return _run_one(arguments.seed, arguments.only, trace=arguments.trace)
    begun_s = time.perf_counter()
    failures = 0
    for ended in _outcomes(seeds, arguments.processes):
        failures += isinstance(ended, str)
        if isinstance(ended, str):
            print(ended, flush=True)
        elif not arguments.quiet:
            _print(ended)
    took_s = time.perf_counter() - begun_s
    print(f"{len(seeds)} seeds from {arguments.seed} on: {failures} failed; {took_s:.1f} s")
    return 1 if failures else 0


def run_or_tell(seed: int) -> Outcome | str:
    """A seed's outcome, or what went wrong: exceptions lose their notes between processes."""
    try:
        return run_seed(seed)
    except Exception as error:  # noqa: BLE001  # every failure is told with its seed
        return f"seed {seed}: {type(error).__name__}: {error}\n  replay: {replay_line(seed)}"


def _outcomes(seeds: range, processes: int) -> Iterator[Outcome | str]:
    if processes == 1:
        yield from map(run_or_tell, seeds)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_or_tell, seeds, chunksize=4)


def _run_one(seed: int, only: tuple[int, ...] | None, *, trace: bool) -> int:
    """One seed; one that fails is made small, and the line that replays it printed."""
    try:
        _print(run_seed(seed, only=only, trace=trace))
    except Exception as error:
        if only is None and not trace:
            error.add_note(f"shrunk: {replay_line(seed, shrunk(seed, error))}")
        raise
    return 0


def _print(outcome: Outcome) -> None:
    print(
        f"seed {outcome.seed}: {outcome.num_nodes} nodes, {outcome.hours:.0f} h, "
        f"{len(outcome.faults)} faults, {outcome.num_events} events, {outcome.num_facts} facts"
    )
    for job, end in outcome.jobs.items():
        print(f"  {job}: {end}")


if __name__ == "__main__":
    sys.exit(main())
