"""What counts as a sign of life of a process that reports nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.activity import IDLE_S, IDLE_SHARE, MAX_GAP_S, Activity, Sign

PERIOD_S = 5.0


def moves(signs: Iterable[Sign]) -> list[int]:
    activity = Activity()
    return [activity.look(sign) for sign in signs]


def steady(share: float, number: int, *, period_s: float = PERIOD_S) -> list[Sign]:
    """A process that uses that share of a CPU and prints nothing."""
    return [
        Sign(at_s=at * period_s, output_bytes=7, cpu_s=3.0 + share * at * period_s)
        for at in range(number)
    ]


def test_a_process_that_does_nothing_does_not_move() -> None:
    assert moves(steady(0.0, 1_000)) == [0] * 1_000


@given(st.floats(0.0, IDLE_SHARE), st.floats(1.0, MAX_GAP_S))
def test_what_a_waiting_program_uses_is_no_move(share: float, period_s: float) -> None:
    assert set(moves(steady(share, 500, period_s=period_s))) == {0}


@given(st.floats(1.5 * IDLE_SHARE, 64.0))
def test_what_works_moves_at_least_every_few_seconds(share: float) -> None:
    counts = moves(steady(share, 100))
    # The constant part is used up after so many looks.
    most_looks = 1 + int(IDLE_S / ((share - IDLE_SHARE) * PERIOD_S)) + 1
    assert counts[-1] >= 99 // most_looks


def test_each_growth_of_the_output_is_a_move() -> None:
    sizes = [10, 10, 11, 11, 500, 500]
    signs = [Sign(at_s=at, output_bytes=size, cpu_s=0.0) for at, size in enumerate(sizes)]
    assert moves(signs) == [0, 0, 1, 1, 2, 2]


def test_a_log_that_is_cut_is_no_move_and_its_next_line_is_one() -> None:
    sizes = [1_000, 20, 20, 30]
    signs = [Sign(at_s=at, output_bytes=size, cpu_s=0.0) for at, size in enumerate(sizes)]
    assert moves(signs) == [0, 0, 0, 1]


def test_time_that_goes_with_a_child_is_no_move_and_hides_none() -> None:
    times = [100.0, 40.0, 40.0, 41.0, 42.0]
    signs = [Sign(at_s=at, output_bytes=0, cpu_s=cpu_s) for at, cpu_s in enumerate(times)]
    assert moves(signs) == [0, 0, 0, 1, 2]


def test_cpu_time_that_cannot_be_read_is_no_silence() -> None:
    times = [None, None, 5.0, 5.0, None, 5.0]
    signs = [Sign(at_s=at, output_bytes=0, cpu_s=cpu_s) for at, cpu_s in enumerate(times)]
    assert moves(signs) == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("away_s", [60.0, 36_000.0])
def test_an_observer_that_was_away_sees_the_next_move_at_once(away_s: float) -> None:
    """It was stopped with the whole machine, in which nothing could use a CPU."""
    asleep = steady(0.0, 3)
    at_s = asleep[-1].at_s + away_s
    signs = [
        *asleep,
        Sign(at_s=at_s, output_bytes=7, cpu_s=3.0),
        Sign(at_s=at_s + PERIOD_S, output_bytes=7, cpu_s=3.0 + PERIOD_S),
    ]
    assert moves(signs)[-1] == 1
