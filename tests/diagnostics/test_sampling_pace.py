"""How often the counters of links are read."""

import pytest

from diagnostics.core.sampling_pace import SamplingLimits, SamplingPace

WINDOW_S = 2.0
LIMITS = SamplingLimits()


def took(pace: SamplingPace, *, sample_s: float, rest: float = 1e-3, windows: int = 1) -> float:
    """Windows that take so much of the processor; the share of a core of the last one."""
    cost = 0.0
    for _ in range(windows):
        num_samples = round(WINDOW_S / pace.interval_s)
        pace.took(
            sampling_s=sample_s * num_samples,
            num_samples=num_samples,
            rest_s=rest * WINDOW_S,
            seconds=WINDOW_S,
        )
        cost = sample_s * num_samples / WINDOW_S + rest
    return cost


def test_sampling_is_as_usual_until_it_is_known_what_it_takes() -> None:
    assert SamplingPace().interval_s == LIMITS.usual_s


@pytest.mark.parametrize("sample_s", [65e-6, 70e-6, 80e-6])
def test_sampling_is_as_usual_where_it_costs_neither_too_much_nor_little(sample_s: float) -> None:
    pace = SamplingPace()
    assert took(pace, sample_s=sample_s, windows=10) <= LIMITS.most_cost
    assert pace.interval_s == LIMITS.usual_s


def test_sampling_of_few_links_is_more_often_as_far_as_it_is_cheap() -> None:
    pace = SamplingPace()
    cost = took(pace, sample_s=20e-6, windows=10)
    assert LIMITS.least_s < pace.interval_s < LIMITS.usual_s
    assert cost == pytest.approx(LIMITS.cheap_cost, rel=0.01)
    # Nothing to read: as often as it may.
    took(pace, sample_s=0.0, windows=10)
    assert pace.interval_s == LIMITS.least_s


def test_sampling_of_many_links_takes_what_it_may_and_no_more() -> None:
    pace = SamplingPace()
    cost = took(pace, sample_s=200e-6, windows=10)
    assert LIMITS.usual_s < pace.interval_s < LIMITS.most_s
    assert cost == pytest.approx(LIMITS.most_cost, rel=0.01)
    took(pace, sample_s=200e-6, rest=0.02, windows=10)
    assert pace.interval_s == LIMITS.most_s


def test_one_window_does_not_change_how_often_links_are_sampled() -> None:
    pace = SamplingPace()
    took(pace, sample_s=75e-6, windows=10)
    took(pace, sample_s=300e-6)
    assert pace.interval_s == LIMITS.usual_s
    # What lasts does, within a few of them.
    took(pace, sample_s=300e-6, windows=5)
    assert took(pace, sample_s=300e-6) == pytest.approx(LIMITS.most_cost, rel=0.01)
