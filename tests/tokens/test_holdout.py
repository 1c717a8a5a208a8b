"""Held-out sequences are found by arithmetic, and each sequence is in one split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.tokens.holdout import BLOCK_SEQUENCES, Holdout

FRACTIONS = st.one_of(st.sampled_from([0.02, 0.1, 1 / 3, 0.3, 0.49]), st.floats(1e-4, 0.4999))


@given(st.integers(0, 3000), FRACTIONS)
def test_every_sequence_is_in_one_split(number: int, fraction: float) -> None:
    split = Holdout(num_sequences=number, fraction=fraction)
    held = [split.held_out(index) for index in range(split.num_held_out)]
    trained = [split.trained_on(index) for index in range(split.num_trained_on)]
    assert sorted(held + trained) == list(range(number))
    assert abs(len(held) - number * fraction) <= BLOCK_SEQUENCES
    assert held == sorted(held)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3])
def test_both_splits_are_from_all_over_a_file(fraction: float) -> None:
    number = 10**9
    split = Holdout(num_sequences=number, fraction=fraction)
    assert split.num_held_out == pytest.approx(number * fraction, abs=BLOCK_SEQUENCES)
    middle = split.held_out(split.num_held_out // 2)
    assert middle == pytest.approx(number / 2, rel=1e-4)
    assert split.trained_on(split.num_trained_on - 1) < number
