"""Steps that are left out, and states that are not to be resumed from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.skipped import StepRange, is_skipped, is_undone, num_skipped

_RANGES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 12)).map(
        lambda pair: StepRange(first=pair[0], last=pair[0] + pair[1])
    ),
    max_size=5,
)


@given(_RANGES, st.integers(0, 60))
def test_steps_are_counted_once_however_ranges_overlap(ranges: list[StepRange], step: int) -> None:
    assert num_skipped(ranges, step) == sum(is_skipped(ranges, n) for n in range(1, step + 1))


@given(_RANGES, st.integers(0, 60))
def test_only_what_is_left_out_can_be_undone(ranges: list[StepRange], step: int) -> None:
    assert is_skipped(ranges, step) or not is_undone(ranges, step)


def test_the_step_before_a_range_and_its_last_one_count() -> None:
    ranges = (StepRange(first=7, last=7), StepRange(first=11, last=20))
    assert [step for step in range(1, 25) if is_undone(ranges, step)] == list(range(11, 20))
