"""How long ranks took for their steps, and who of them worked for longer than its peers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.layout import Layout
from outlast.trace.heat import Measure, step_times
from outlast.trace.ranks import TracedRank, TracedSpan
from tests.trace.test_trace import a_pass, a_phase, operation, rank_of, step


def a_rank(number: int, work_ms: float, steps: range = range(1, 5), dp: int = 4) -> TracedRank:
    """Steps of 10 ms: so much work of its own, then it waits for the others."""
    return rank_of(
        number,
        tuple(
            operation(10 * each + work_ms, 10 * each + 10, sequence=each)
            # What it waited in before is the end of the step before.
            for each in (steps[0] - 1, *steps)
        ),
        tuple(step(each, 10 * each, 10 * each + 10) for each in steps),
        layout=Layout(dp=dp),
    )


def test_a_step_is_work_and_waiting() -> None:
    (first, *_) = step_times(a_rank(0, 3.0))
    assert (first.step, first.total_s) == (1, 0.01)
    assert first.work_s == pytest.approx(0.003)
    assert first.of(Measure.WAITING) == pytest.approx(0.007)
    assert first.of(Measure.STEP) == first.total_s


def test_of_steps_whose_operations_are_lost_the_length_is_known() -> None:
    rank = a_rank(0, 3.0)
    # The ring has gone round.
    rank = replace(rank, operations=rank.operations[3:])
    times = step_times(rank)
    assert [each.work_s is None for each in times] == [True, True, True, False]
    assert {each.total_s for each in times} == {0.01}
    assert [each.work_s for each in step_times(replace(rank, operations=()))] == [None] * 4


def spans_of_step(at_ms: float) -> tuple[TracedSpan, ...]:
    """As a rank notes them, in the order of their ends; its step takes 10 ms."""
    return (
        a_phase("data", at_ms, at_ms + 1),
        a_pass("forward", at_ms + 1, at_ms + 4, waited_ms=1),
        a_pass("backward", at_ms + 4, at_ms + 7),
        a_pass("forward", at_ms + 7, at_ms + 8),
        a_phase("forward_backward", at_ms + 1, at_ms + 8, waited_ms=1),
        a_phase("optimizer", at_ms + 8, at_ms + 10),
        # Once the step is over.
        a_phase("checkpoint", at_ms + 10.5, at_ms + 11.25),
        a_phase("garbage_collection", at_ms + 11.25, at_ms + 12),
    )


def test_a_step_is_split_by_its_phases_and_passes() -> None:
    steps = (step(1, 0, 10), step(2, 12, 22))
    spans = (*spans_of_step(0), *spans_of_step(12)[:-2], a_phase("data", 22.5, 23))
    first, second = step_times(replace(rank_of(0, (), steps), spans=spans))
    found = {measure: first.of(measure) for measure in Measure if measure is not Measure.STEP}
    assert found == {
        Measure.WORK: None,
        Measure.WAITING: None,
        Measure.FORWARD: pytest.approx(0.003),
        Measure.BACKWARD: pytest.approx(0.003),
        Measure.DATA: pytest.approx(0.001),
        Measure.OPTIMIZER: pytest.approx(0.002),
        Measure.CHECKPOINT: pytest.approx(0.00075),
        Measure.GARBAGE_COLLECTION: pytest.approx(0.00075),
    }
    # It saved nothing, and the data behind it is of the step that is not over.
    assert second.of(Measure.CHECKPOINT) == second.of(Measure.GARBAGE_COLLECTION) == 0
    assert second.of(Measure.DATA) == pytest.approx(0.001)


def test_what_a_rank_never_notes_is_not_known() -> None:
    """A script may name no phase at all, or only some."""
    rank = replace(rank_of(0, (), (step(1, 0, 10),)), spans=(a_phase("data", 0, 2),))
    (only,) = step_times(rank)
    assert only.of(Measure.DATA) == pytest.approx(0.002)
    assert (only.of(Measure.FORWARD), only.of(Measure.CHECKPOINT)) == (None, None)


def test_a_checkpoint_is_of_the_step_before_it_also_where_steps_follow_at_once() -> None:
    steps = (step(1, 0, 10), step(2, 10, 20), step(3, 20, 30))
    spans = (a_phase("data", 0, 1), a_phase("checkpoint", 20, 24))
    found = step_times(replace(rank_of(0, (), steps), spans=spans))
    assert [each.of(Measure.CHECKPOINT) for each in found] == [0, pytest.approx(0.004), 0]


def test_the_last_phase_of_a_step_ends_with_it() -> None:
    rank = replace(rank_of(0, (), (step(1, 0, 10),)), spans=(a_phase("optimizer", 0, 15),))
    (only,) = step_times(rank)
    assert only.of(Measure.OPTIMIZER) == pytest.approx(0.01)


def test_of_steps_whose_passes_are_lost_nothing_is_said_of_them() -> None:
    steps = (step(1, 0, 10), step(2, 12, 22))
    # The ring has gone round within the first step.
    spans = (*spans_of_step(0)[3:], *spans_of_step(12))
    first, second = step_times(replace(rank_of(0, (), steps), spans=spans))
    assert (first.of(Measure.FORWARD), first.of(Measure.DATA)) == (None, None)
    assert second.of(Measure.FORWARD) == pytest.approx(0.003)
    assert [each.of(Measure.DATA) for each in step_times(rank_of(0, (), steps))] == [None, None]
