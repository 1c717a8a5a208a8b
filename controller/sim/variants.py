"""What else could be: a scenario with one duration or one policy changed, against itself.

Each variant is a run of its own. So that a dozen of them cost no more than the scenario
itself, they run on a small fleet whose job is struck as often, and whose communicators take
as long to form, as those of the whole; each is compared with the unchanged scenario there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context, parent_process
from threading import Thread

from controller.sim.scenario import Result, Scenario, simulate

# A rack of this fleet is an eighth of it, as large as racks are; see `campaign.RACK_NODES`.
SMALL_FLEET_NODES = 128

# More faults than this make a comparison no better, only longer.
MAX_FAULTS = 400

# Durations that are changed together, by the name of the phase that they make up.
PHASES: Mapping[str, tuple[str, ...]] = {
    "detection": (
        "detect_process",
        "detect_gpu",
        "detect_network",
        "detect_hang",
        "judge",
        "detect_sdc",
    ),
    "diagnosis": ("diagnose",),
    "checks of a replacement": ("preflight",),
    "provisioning": ("provision",),
    "process start": ("process",),
    "NCCL start": ("nccl",),
    "restore": ("restore_memory", "restore_storage"),
    "checkpoint stall": ("checkpoint_stall",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A change, in words, and the scenario that it makes."""

    kind: str
    name: str
    scenario: Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a change gives: ETTR with it and without it, on the same faults.

    Steps at a smaller size count as at full size: half of the nodes are not as good as all.
    """

    kind: str
    name: str
    ettr: float
    change: float
    violations: tuple[str, ...]


def small(scenario: Scenario) -> Scenario:
    """The scenario on a small fleet that is struck as often, for as long as it takes to compare."""
    days = min(scenario.days, MAX_FAULTS / (scenario.nodes * scenario.node_faults_per_day))
    # At least a day, where the scenario has one.
    days = max(min(1.0, scenario.days), round(days, 2))
    if scenario.nodes <= SMALL_FLEET_NODES:
        return replace(scenario, days=days, standbys=scenario.num_standbys, mass=0)
    return replace(
        scenario,
        days=days,
        nodes=SMALL_FLEET_NODES,
        rate=scenario.rate * scenario.nodes / SMALL_FLEET_NODES,
        standbys=min(SMALL_FLEET_NODES, scenario.num_standbys),
        scale_gpus=scenario.num_gpus,
        mass=0,
    )


def variants(scenario: Scenario) -> tuple[Variant, ...]:
    """The unchanged scenario first, then one change each."""
    base = small(scenario)
    found = [Variant(kind="base", name="as it is", scenario=base)]
    durations = base.all_durations()
    for phase, names in PHASES.items():
        doubled = {name: 2.0 * durations[name].expected_s for name in names}
        changed = replace(base, durations={**base.durations, **doubled})
        found.append(Variant(kind="twice as long", name=phase, scenario=changed))
    policies = {
        f"storage every {base.interval_s / 4:g} s": replace(
            base, interval_s=max(base.step_s, base.interval_s / 4)
        ),
        f"storage every {base.interval_s * 4:g} s": replace(base, interval_s=base.interval_s * 4),
        "no standbys": replace(base, standbys=0),
        f"{2 * base.num_standbys} standbys": replace(base, standbys=2 * base.num_standbys),
        f"heartbeat every {base.heartbeat_s * 5:g} s": replace(
            base, heartbeat_s=base.heartbeat_s * 5
        ),
        f"heartbeat every {base.heartbeat_s / 4:g} s": replace(
            base, heartbeat_s=base.heartbeat_s / 4
        ),
        "no replicas in host memory" if base.replicas else "replicas in host memory": replace(
            base, replicas=not base.replicas
        ),
        "always at full size" if base.elastic else "elastic": replace(
            base, elastic=not base.elastic
        ),
        "no standbys, always at full size" if base.elastic else "no standbys, elastic": replace(
            base, standbys=0, elastic=not base.elastic
        ),
    }
    found += [Variant(kind="policy", name=name, scenario=s) for name, s in policies.items()]
    return tuple(found)


def compare(
    scenario: Scenario,
    *,
    processes: int = 2,
    report: Callable[[str, float, float], None] = lambda what, done, total: None,
) -> tuple[Comparison, ...]:
    """Run all variants; the first comparison is the unchanged scenario, with no change.

    `report` gets what was compared last, and how many variants of how many are done.
    """
    chosen = variants(scenario)
    found: list[Comparison] = []
    report("variants compared", 0, len(chosen))
    for variant, result in zip(chosen, _results(chosen, processes), strict=True):
        base_ettr = found[0].ettr if found else result.full_ettr
        found.append(
            Comparison(
                kind=variant.kind,
                name=variant.name,
                ettr=result.full_ettr,
                change=result.full_ettr - base_ettr,
                violations=result.violations,
            )
        )
        report(f"variants compared; last: {variant.name}", len(found), len(chosen))
    return tuple(found)


def _results(chosen: tuple[Variant, ...], processes: int) -> Iterator[Result]:
    """What comes of each, in order. Who is interrupted leaves no process behind."""
    before = active_children()
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_end_with_parent
    )
    try:
        yield from pool.map(simulate, [variant.scenario for variant in chosen])
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            if child not in before:
                child.terminate()
        raise
    pool.shutdown()


def _end_with_parent() -> None:
    """Die quietly when interrupted, and when the parent dies: it says what happened, if it can."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
