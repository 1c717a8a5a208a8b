"""Two hundred seeds of the virtual world, every checker on.

A failing seed is printed with the line that replays it, the first ones with few faults.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from controller.core.kinds import Action, Cause
from controller.core.states import IncidentState, JobState, NodeState
from controller.sim.faults import FAULTS, MIN_FAULTS
from controller.sim.run import Failure, Outcome, run_or_tell, run_seed, shrunk_lines
from outlast.v1 import agents_pb2

NUM_SEEDS = 200
SEEDS_PER_CHUNK = 25
# After the others these take no time; alone they run all seeds, minutes of a busy machine.
ALONE = pytest.mark.timeout(900)


class _Seeds:
    """Seeds in two processes; each is run once, by the first test that asks for it."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._ended: dict[int, Outcome | Failure] = {}

    def outcomes(self, seeds: range) -> list[Outcome]:
        """What became of them.

        Raises:
            AssertionError: some failed; each is told with the line that replays it.
        """
        new = [seed for seed in seeds if seed not in self._ended]
        self._ended.update(zip(new, self._pool.map(run_or_tell, new, chunksize=4), strict=True))
        ended = [self._ended[seed] for seed in seeds]
        failures = [each for each in ended if isinstance(each, Failure)]
        reports = [failure.report for failure in failures]
        assert not failures, "\n".join((*reports, *shrunk_lines(failures)))
        return [each for each in ended if isinstance(each, Outcome)]


@pytest.fixture(scope="module")
def seeds() -> Iterator[_Seeds]:
    """Two processes at most: other tests want the machine, too."""
    workers = min(2, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        yield _Seeds(executor)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_CHUNK))
def test_every_invariant_holds_under_faults(seeds: _Seeds, first: int) -> None:
    assert len(seeds.outcomes(range(first, first + SEEDS_PER_CHUNK))) == SEEDS_PER_CHUNK


@ALONE
def test_seeds_are_as_large_as_promised(seeds: _Seeds) -> None:
    for outcome in seeds.outcomes(range(NUM_SEEDS)):
        assert outcome.num_nodes >= 32
        assert outcome.hours >= 24.0
        assert len(outcome.struck) >= MIN_FAULTS
        # One that does not fit its nodes may come on top.
        assert 1 <= len(set(outcome.jobs) - {"misfit"}) <= 3


# Kinds of messages that have no meaning in a simulated world.
NOT_SIMULATED = {
    "log_query": "workers of the simulation write no logs",
    "log_chunk": "as above",
    "check_order": "nothing is measured: a search ends with what the world knows of its nodes",
    "check_report": "as above",
    "clock_echo": "its nodes have one clock; what is made of such answers decides nothing",
}


def _kinds(message: type[agents_pb2.AgentMessage | agents_pb2.ControllerMessage]) -> set[str]:
    """Every kind of a message; those of events and commands by what they bring."""
    found = set()
    for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields:
        inner = field.message_type if field.name in ("event", "command") else None
        if inner is None:
            found.add(field.name)
        else:
            inner_kinds = inner.oneofs_by_name["kind"].fields
            found.update(f"{field.name}.{each.name}" for each in inner_kinds)
    return found


@ALONE
def test_seeds_see_every_kind_of_message_between_agents_and_controller(seeds: _Seeds) -> None:
    seen: set[str] = set()
    for outcome in seeds.outcomes(range(NUM_SEEDS)):
        seen.update(outcome.seen)
    kinds = _kinds(agents_pb2.AgentMessage) | _kinds(agents_pb2.ControllerMessage)
    never_seen = {kind for kind in kinds if f"message {kind}" not in seen}
    assert never_seen == set(NOT_SIMULATED)


@ALONE
def test_seeds_reach_every_state_fault_and_verdict(seeds: _Seeds) -> None:
    """A simulation that never gets somewhere proves nothing about it."""
    seen: Counter[str] = Counter()
    for outcome in seeds.outcomes(range(NUM_SEEDS)):
        seen.update(outcome.seen)
        seen.update(f"fault {name}" for name in outcome.struck)
    expected = {f"fault {name}" for name in FAULTS}
    # RESTARTING, OPEN and ACTING pass within one batch, but the journal has them all.
    expected |= {f"job {state}" for state in JobState}
    expected |= {f"node {state}" for state in NodeState}
    expected |= {f"incident CLOSED:{action}" for action in Action if action is not Action.DIAGNOSE}
    expected |= {f"incident {state}" for state in (IncidentState.OPEN, IncidentState.EVIDENCE)}
    expected |= {"job shrinks", "job grows", "answer overtaken"}
    # The world's jobs are all valid, nothing in it is unexplained, its ranks say nothing of where
    # their time goes, its stores keep what was committed to them, and weeks are not looked back on.
    found_in_figures = (Cause.STRAGGLER, Cause.DATA_STALL)
    over_weeks = (Cause.MFU_DECLINE, Cause.PERIODIC_STALL, Cause.LATE_LAUNCHES)
    of_hosts = (Cause.HOST_MEMORY, Cause.DISK, Cause.NODE_CONDITION, Cause.TRAFFIC)
    unreached = (
        *(Cause.CONFIG, Cause.CHECKPOINT, Cause.WORKER_LOG),
        *(*found_in_figures, *of_hosts, *over_weeks),
    )
    expected |= {f"cause {cause}" for cause in Cause if cause not in unreached}
    missing = sorted(expected - set(seen))
    assert not missing, f"no seed reached: {missing}"


def test_a_seed_replays_exactly() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first == second
