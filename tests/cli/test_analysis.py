"""The figures of the demo's report, from recorded data."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest

from demo import analysis
from demo.faults import NODE_WINDOW, WORKER_WINDOW, plan_faults
from tests.cli.recorded import (
    NODE_FAULT,
    START_S,
    STEP_S,
    WORKER_FAULT,
    curve,
    incident,
)


def test_identical_curves_have_no_first_difference() -> None:
    assert analysis.first_difference(curve(10), curve(10), steps=10) is None
    assert analysis.losses_sha256(curve(10)) == analysis.losses_sha256(curve(10, attempt=3))


def test_one_bit_of_one_loss_is_a_difference() -> None:
    theirs = curve(10)
    ours = [replace(s, loss=math.nextafter(s.loss, math.inf)) if s.step == 7 else s for s in theirs]
    found = analysis.first_difference(ours, theirs, steps=10)
    assert found is not None
    assert found["step"] == 7
    assert found["loss_bits"] != found["fault_free_bits"]
    assert analysis.losses_sha256(ours) != analysis.losses_sha256(theirs)


def test_comparison_is_of_bits_not_of_numbers() -> None:
    """-0.0 == 0.0 and NaN != NaN, but the promise is the same bits."""
    zero, minus_zero = (replace(curve(1)[0], loss=loss) for loss in (0.0, -0.0))
    assert analysis.first_difference([zero], [minus_zero], steps=1) is not None
    nan = replace(zero, loss=math.nan)
    assert analysis.first_difference([nan], [nan], steps=1) is None


def test_step_that_was_redone_differently_is_a_difference() -> None:
    """The last report of a step may agree by luck; every one of them must."""
    theirs = curve(10)
    odd = replace(theirs[4], attempt=1, loss=9.0)
    redone = [*theirs[:4], odd, *(replace(s, attempt=2) for s in theirs[4:])]
    found = analysis.first_difference(redone, theirs, steps=10)
    assert found is not None
    assert (found["step"], found["attempt"]) == (5, 1)


@pytest.mark.parametrize("missing_from", ["ours", "theirs"])
def test_missing_step_is_a_difference(missing_from: str) -> None:
    whole, short = curve(10), curve(9)
    ours, theirs = (short, whole) if missing_from == "ours" else (whole, short)
    found = analysis.first_difference(ours, theirs, steps=10)
    assert found is not None
    assert found["step"] == 10
    assert "has no loss" in found["why"]


def test_settled_takes_the_newest_attempt_once_per_step() -> None:
    reports = [*curve(6), *curve(8, attempt=2)[4:]]
    settled = analysis.settled(reports)
    assert [step.step for step in settled] == list(range(1, 9))
    assert [step.attempt for step in settled] == [1, 1, 1, 1, 2, 2, 2, 2]


def test_ettr_counts_each_step_once_over_the_whole_time() -> None:
    # Ten steps of 0.5 s in 10 s: half of the time was productive.
    steps = curve(10)
    assert analysis.productive_s(steps) == pytest.approx(10 * STEP_S)
    assert analysis.ettr(steps, START_S + 10.0) == pytest.approx(0.5)
    # Steps that were done again do not count twice.
    again = [*steps, *(replace(step, attempt=2) for step in steps[5:])]
    assert analysis.ettr(again, START_S + 10.0) == pytest.approx(0.5)


def test_ettr_of_an_undisturbed_run_is_one_and_of_nothing_is_zero() -> None:
    assert analysis.ettr(curve(10), START_S + 10 * STEP_S) == pytest.approx(1.0)
    assert analysis.ettr([], START_S) == 0.0


def test_each_fault_finds_the_incident_that_names_its_node() -> None:
    first, second = incident(1, WORKER_FAULT), incident(2, NODE_FAULT)
    assert analysis.match_incidents([WORKER_FAULT, NODE_FAULT], [second, first]) == [first, second]


def test_incident_before_the_fault_or_about_storage_or_elsewhere_is_not_its_incident() -> None:
    early = incident(1, WORKER_FAULT, opened_s=WORKER_FAULT.at_s - 1)
    storage = incident(2, WORKER_FAULT, cause="storage")
    elsewhere = incident(3, NODE_FAULT)
    assert analysis.match_incidents([WORKER_FAULT], [early, storage, elsewhere]) == [None]


def test_costs_count_from_the_injection() -> None:
    found = analysis.describe_fault(WORKER_FAULT, incident(1, WORKER_FAULT))
    assert found["detection_s"] == pytest.approx(0.25)
    assert found["recovery_s"] == pytest.approx(1.5)
    assert found["steps_redone"] == 0
    assert found["diagnosis"] == "node-1 rank 3: killed by SIGKILL"
    assert found["victim"] == "rank 3 on node-1 (pid 4711)"


def test_phases_last_until_the_next_one() -> None:
    phases = analysis.phases(incident(1, WORKER_FAULT), WORKER_FAULT.at_s)
    assert [phase.name for phase in phases] == [
        *("injected", "fault", "detected", "suspending", "first_step", "closed"),
    ]
    assert phases[0].start_s == 0.0
    assert phases[1].start_s == pytest.approx(0.1)
    assert phases[3].duration_s == pytest.approx(1.3)
    assert phases[-1].duration_s == 0.0


def test_fault_that_nobody_noticed_has_no_figures() -> None:
    found = analysis.describe_fault(NODE_FAULT, None)
    assert found["incident_id"] is None
    assert found["detection_s"] is None
    assert found["timeline"] == []


def test_bits_are_little_endian_doubles() -> None:
    assert analysis.bits(1.5) == struct.pack("<d", 1.5)


def test_seed_decides_the_faults() -> None:
    assert plan_faults(7, 300) == plan_faults(7, 300)
    assert len({plan_faults(seed, 300) for seed in range(20)}) == 20


@pytest.mark.parametrize("steps", [10, 60, 300, 5_000])
def test_faults_fall_in_their_windows_and_in_order(steps: int) -> None:
    for seed in range(200):
        worker, node = plan_faults(seed, steps)
        assert 1 <= worker.after_step < node.after_step < steps
        assert WORKER_WINDOW[0] * steps - 1 <= worker.after_step <= WORKER_WINDOW[1] * steps + 1
        assert NODE_WINDOW[0] * steps - 1 <= node.after_step <= NODE_WINDOW[1] * steps + 1
        assert 0 <= worker.choose(range(8)) < 8


def test_every_rank_can_be_hit() -> None:
    assert {plan_faults(seed, 300)[0].choose(range(8)) for seed in range(200)} == set(range(8))
