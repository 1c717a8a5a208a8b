"""One seed from beginning to end: `python -m controller.sim.run --seed N [--trace]`.

Safety phase: a virtual day of faults with every checker on. Liveness phase:
faults stop, people put things right, and every job must end with a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

from controller.core.changes import State
from controller.sim.faults import SAFETY_S, end_faults, plan_faults
from controller.sim.garbage import few_collections
from controller.sim.shapes import draw_shape
from controller.sim.shrink import shrink
from controller.sim.timeline import EPOCH_S
from controller.sim.violation import kind_of
from controller.sim.world import World
from outlast.ids import JobId

# Jobs take eleven hours at most, and lose some of it to every fault.
LIVENESS_S = 48 * 3600.0
# Quarantines that wait for a node are given up after two hours.
SETTLE_S = 3 * 3600.0
# Shrinking takes about a hundred runs. Of many failing seeds the first few are shrunk: most
# fail for the same reason.
SHRINK_S = 60.0
MAX_SHRUNK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a seed did."""

    seed: int
    num_nodes: int
    num_events: int
    num_changes: int
    hours: float
    # Those that were planned, and of them those that met something.
    faults: tuple[str, ...]
    struck: tuple[str, ...]
    jobs: dict[JobId, str]
    seen: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong with a seed, as text: exceptions lose their notes between processes."""

    seed: int
    # What broke; see `_kind_of`.
    kind: str
    report: str


def run_seed(seed: int, *, only: tuple[int, ...] | None = None, trace: bool = False) -> Outcome:
    """Run a seed, or with some of its faults only.

    Raises:
        Violation: an invariant does not hold. Any other exception is one, too.
    """
    world = World(seed, draw_shape(Random(f"shape {seed}")), trace=trace)
    try:
        with few_collections():
            faults = plan_faults(world, only)
            world.timeline.run_until(EPOCH_S + SAFETY_S)
            state = end_world(world)
    except Exception as error:
        error.add_note(f"replay: {replay_line(seed, only)}")
        raise
    jobs = {job.job_id: f"{job.state}: {job.reason}" for job in state.jobs.values()}
    return Outcome(
        seed=seed,
        num_nodes=len(world.nodes),
        num_events=world.timeline.num_run,
        num_changes=world.controller.journal.num_changes,
        hours=world.hours,
        faults=tuple(faults),
        struck=tuple(world.struck),
        jobs=jobs,
        seen=world.tracer.seen,
    )


def end_world(world: World) -> State:
    """The liveness phase, from the end of all faults on; what it came to.

    Raises:
        Violation: an invariant does not hold.
    """
    end_faults(world)
    deadline_s = world.now_s + LIVENESS_S
    while not world.all_finished and world.now_s < deadline_s:
        world.timeline.run_until(world.now_s + 600.0)
    world.timeline.run_until(world.now_s + SETTLE_S)
    machine = world.controller.machine
    assert machine is not None
    world.checkers.finished(machine.state)
    return machine.state


def replay_line(seed: int, only: tuple[int, ...] | None = None) -> str:
    """What shows a run again, line by line."""
    faults = "" if only is None else f" --only {','.join(map(str, only)) or 'none'}"
    return f"python -m controller.sim.run --seed {seed}{faults} --trace"


def shrunk(seed: int, kind: str, *, within_s: float = SHRINK_S) -> tuple[int, ...]:
    """The faults that it takes for a failing seed to fail in the same way.

    More than it takes when the time is over first.
    """
    end_s = time.perf_counter() + within_s

    def fails(only: tuple[int, ...]) -> bool:
        if time.perf_counter() > end_s:
            return False
        try:
            run_seed(seed, only=only)
        except Exception as again:  # noqa: BLE001  # whatever it is, it is compared
            return _kind_of(again) == kind
        return False

    world = World(seed, draw_shape(Random(f"shape {seed}")))
    return shrink(tuple(range(len(plan_faults(world)))), fails)


def _kind_of(error: Exception) -> str:
    return f"{type(error).__name__} {kind_of(str(error))}"


def _only(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(number) for number in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds and print one line for each."""
    arguments = _parser().parse_args(argv)
    if arguments.count == 1:
        return _run_one(arguments.seed, arguments.only, trace=arguments.trace)
    begun_s = time.perf_counter()
    outcomes, failures = _run_many(arguments)
    took_s = time.perf_counter() - begun_s
    print(
        f"{arguments.count} seeds from {arguments.seed} on: {len(failures)} failed; {took_s:.1f} s"
    )
    for line in shrunk_lines(failures):
        print(line, flush=True)
    if arguments.output is not None:
        summary = {
            "seeds": arguments.count,
            "first_seed": arguments.seed,
            "failed": [failure.seed for failure in failures],
            "seconds": round(took_s, 1),
            "processes": arguments.processes,
            "min_nodes": min((each.num_nodes for each in outcomes), default=0),
            "min_virtual_hours": min((each.hours for each in outcomes), default=0.0),
            "min_faults": min((len(each.struck) for each in outcomes), default=0),
        }
        arguments.output.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    is_late = arguments.within_s is not None and took_s > arguments.within_s
    if is_late:
        print(f"that is longer than the {arguments.within_s:g} s of --within-s")
    return 1 if failures or is_late else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="run this many seeds from --seed on")
    parser.add_argument("--trace", action="store_true", help="one line per event")
    parser.add_argument("--only", type=_only, help="strike with these faults only, as 3,7")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="only failures, and a summary")
    parser.add_argument("--output", type=Path, help="write a summary as JSON to this file")
    parser.add_argument("--within-s", type=float, help="fail when the seeds take longer")
    return parser


def _run_many(arguments: argparse.Namespace) -> tuple[list[Outcome], list[Failure]]:
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    for ended in _ended(seeds, arguments.processes):
        if isinstance(ended, Failure):
            failures.append(ended)
            print(ended.report, flush=True)
            continue
        outcomes.append(ended)
        if not arguments.quiet:
            _print(ended)
    return outcomes, failures


def run_or_tell(seed: int) -> Outcome | Failure:
    """A seed's outcome, or what went wrong."""
    try:
        return run_seed(seed)
    except Exception as error:  # noqa: BLE001  # every failure is printed with its seed
        report = f"seed {seed}: {type(error).__name__}: {error}\n  replay: {replay_line(seed)}"
        return Failure(seed=seed, kind=_kind_of(error), report=report)


def shrunk_lines(failures: Sequence[Failure]) -> Iterator[str]:
    """For each of the first failures, the line that replays it with as few faults as it takes."""
    for failure in failures[:MAX_SHRUNK]:
        line = replay_line(failure.seed, shrunk(failure.seed, failure.kind))
        yield f"seed {failure.seed} shrunk: {line}"


def _ended(seeds: range, processes: int) -> Iterator[Outcome | Failure]:
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
            error.add_note(f"shrunk: {replay_line(seed, shrunk(seed, _kind_of(error)))}")
        raise
    return 0


def _print(outcome: Outcome) -> None:
    print(
        f"seed {outcome.seed}: {outcome.num_nodes} nodes, {outcome.hours:.0f} h, "
        f"{len(outcome.faults)} faults, {outcome.num_events} events, {outcome.num_changes} changes"
    )
    for job, end in outcome.jobs.items():
        print(f"  {job}: {end}")


if __name__ == "__main__":
    sys.exit(main())
