"""Standbys from the failure rate."""

from __future__ import annotations

from math import comb

import pytest

from controller.core.standbys import standbys_for


@pytest.mark.parametrize(("nodes", "expected"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_a_rate_of_0_12_percent_a_day_gives_the_published_numbers(
    nodes: int, expected: int
) -> None:
    """ByteRobust (SOSP '25): P99 of a binomial, 2/2/3/4 for 128/256/512/1,024 machines."""
    assert standbys_for(nodes, 0.0012) == expected


def test_it_is_the_smallest_number_that_suffices() -> None:
    number, fails = standbys_for(64, 0.01), 0.00995
    chances = [comb(64, k) * fails**k * (1 - fails) ** (64 - k) for k in range(number + 1)]
    assert sum(chances) >= 0.99 > sum(chances[:-1])


def test_nodes_that_never_fail_need_none_and_slow_repair_needs_more() -> None:
    assert standbys_for(1000, 0.0) == 0
    assert standbys_for(12_500, 0.004, replenish_days=3.0) > standbys_for(12_500, 0.004)


@pytest.mark.parametrize(
    ("nodes", "rate", "days", "quantile"),
    [(0, 0.1, 1.0, 0.9), (1, -0.1, 1.0, 0.9), (1, 0.1, 0.0, 0.9), (1, 0.1, 1.0, 1.0)],
)
def test_numbers_out_of_bounds_are_refused(
    nodes: int, rate: float, days: float, quantile: float
) -> None:
    with pytest.raises(ValueError, match=r"nodes=|faults a day|quantile"):
        standbys_for(nodes, rate, replenish_days=days, quantile=quantile)
