"""What the steps of a rank took by each measure, from what it notes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.agent.observe.measures import measured
from outlast.blackbox import StepParts
from outlast.trace.heat import Measure

STEP = StepParts(
    step=7,
    length_ns=10_000_000,
    waited_ns=3_000_000,
    spent_ns=(1_000_000, 2_000_000, 500_000, 1_500_000, 750_000, 250_000),
)


def test_a_step_is_work_and_waiting_and_is_split_by_passes_and_phases() -> None:
    assert {measure: measured([STEP], measure, 10)[7] for measure in Measure} == {
        Measure.STEP: pytest.approx(0.010),
        Measure.WORK: pytest.approx(0.007),
        Measure.WAITING: pytest.approx(0.003),
        Measure.FORWARD: pytest.approx(0.001),
        Measure.BACKWARD: pytest.approx(0.002),
        Measure.DATA: pytest.approx(0.0005),
        Measure.OPTIMIZER: pytest.approx(0.0015),
        Measure.CHECKPOINT: pytest.approx(0.00075),
        Measure.GARBAGE_COLLECTION: pytest.approx(0.00025),
    }


def test_operations_that_go_on_behind_a_step_leave_it_no_more_than_its_length() -> None:
    late = replace(STEP, waited_ns=12_000_000)
    assert measured([late], Measure.WAITING, 1) == {7: 0.010}
    assert measured([late], Measure.WORK, 1) == {7: 0.0}


def test_what_a_rank_never_notes_is_not_known() -> None:
    """A script may name no phase at all, or only some."""
    only_data = replace(STEP, spent_ns=(0, 0, 2_000_000, 0, 0, 0))
    assert measured([only_data], Measure.FORWARD, 10) == {}
    assert measured([only_data], Measure.DATA, 10) == {7: pytest.approx(0.002)}


def test_work_of_a_rank_that_notes_no_operation_is_not_known_where_it_has_peers() -> None:
    """A script's own collectives are not seen: it may have waited all the time."""
    silent = replace(STEP, waited_ns=0)
    for measure, alone in ((Measure.WORK, 0.010), (Measure.WAITING, 0.0)):
        assert measured([silent], measure, 10) == {}
        assert measured([silent], measure, 10, is_alone=True) == {7: alone}
    # In some steps it may well have waited for nobody.
    assert measured([STEP, replace(silent, step=8)], Measure.WAITING, 10)[8] == 0


def test_what_only_some_steps_have_is_nothing_in_the_others() -> None:
    saved = replace(STEP, step=8)
    others = [replace(STEP, step=step, spent_ns=(1, 1, 1, 1, 0, 0)) for step in (7, 9)]
    steps = [others[0], saved, others[1]]
    assert measured(steps, Measure.CHECKPOINT, 10) == {7: 0, 8: pytest.approx(0.00075), 9: 0}


def test_only_the_newest_steps_are_of_interest() -> None:
    steps = [replace(STEP, step=step) for step in range(1, 6)]
    assert [*measured(steps, Measure.STEP, 2)] == [4, 5]
