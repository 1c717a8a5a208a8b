"""The steady time of the machine, and what of a journal is brought back to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.edge.timebase import SLEW, STEP_S, TimeBase

HOUR_S, DAY_S = 3_600.0, 86_400.0
START_S = 1.7e9


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, DAY_S, -DAY_S])
def test_step_of_the_wall_clock_is_made_up_for_slowly(step_s: float) -> None:
    base = TimeBase(START_S, 50.0)
    assert base.advance(START_S + 10.0, 60.0) == START_S + 10.0
    # A minute later, with the step in it.
    now_s = base.advance(START_S + 70.0 + step_s, 120.0)
    assert abs(now_s - (START_S + 70.0)) <= SLEW * 60.0
    assert (base.num_steps, base.last_step_s) == (1, pytest.approx(step_s))
    # It has caught up in ten times the step, and is noted once.
    for second in range(1, int(11 * abs(step_s)), 600):
        now_s = base.advance(START_S + 70.0 + step_s + second, 120.0 + second)
    assert base.num_steps == 1
    assert abs(base.offset_s) < 1.0


def test_glitch_that_is_taken_back_leaves_nothing() -> None:
    base = TimeBase(START_S, 0.0)
    base.advance(START_S + 1.0 + DAY_S, 1.0)
    base.advance(START_S + 2.0, 2.0)
    assert base.advance(START_S + 10.0, 10.0) == pytest.approx(START_S + 10.0, abs=0.2)
    assert base.num_steps == 2


@given(st.lists(st.tuples(st.floats(-1e9, 1e10), st.floats(-10.0, 1e5)), max_size=30))
def test_time_never_runs_backwards_nor_away(readings: list[tuple[float, float]]) -> None:
    base, monotonic_s = TimeBase(START_S, 0.0), 0.0
    for wall_s, passed_s in readings:
        before_s = base.now_s
        # A monotonic clock that is not, as on some virtual machines.
        monotonic_s += passed_s
        highest_s = max(monotonic_s, base.monotonic_s)
        allowed_s = highest_s - base.monotonic_s
        now_s = base.advance(wall_s, monotonic_s)
        assert before_s <= now_s
        assert abs(now_s - before_s - allowed_s) <= SLEW * allowed_s + 1e-3


def test_what_ntp_does_is_no_step() -> None:
    base = TimeBase(START_S, 0.0)
    for second in range(1, 1_000):
        base.advance(START_S + second * 1.0005, float(second))
    assert base.num_steps == 0
    assert abs(base.offset_s) < STEP_S
