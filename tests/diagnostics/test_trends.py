"""Slopes over weeks: planted ones are found with their size, noise shows none."""

from __future__ import annotations

import random

import pytest

from diagnostics.core.history import Finding, Hour, Subject, findings, history
from diagnostics.core.trends import SIGNIFICANT, WEEK_S, Point, trend

HOUR_S = 3600.0
BEGUN_S = 1_700_000_000.0 // HOUR_S * HOUR_S


def hours(
    count: int,
    *,
    seed: int,
    per_week: float = 0.0,
    noise: float = 0.02,
    follows: float = 0.0,
    attempt_hours: int = 10_000,
    late: float = 0.02,
    late_per_week: float = 0.0,
    layout: str = "tp1",
) -> list[Hour]:
    """Hours of a job whose speed changes so much a week; noise follows itself so closely."""
    chance = random.Random(seed)
    made, error = [], 0.0
    for number in range(count):
        error = follows * error + chance.gauss(0, noise * (1 - follows**2) ** 0.5)
        weeks = number / 168
        speed = 1e6 * (1 + per_week * weeks) * (1 + error)
        late_ratio = late + late_per_week * weeks + abs(chance.gauss(0, 0.002))
        made.append(
            Hour(
                begun_s=BEGUN_S + number * HOUR_S,
                attempt=1 + number // attempt_hours,
                layout=layout,
                num_steps=700,
                tokens=round(speed * HOUR_S),
                seconds=HOUR_S,
                step_s=5.0,
                spread_s=10 * late_ratio,
                late_s=5.0 * late_ratio,
            )
        )
    return made


def noted(found: list[Hour]) -> dict[Subject, Finding]:
    return {each.subject: each for each in findings(history(found), {})}


@pytest.mark.parametrize("per_week", [-0.06, -0.15, 0.08])
def test_a_planted_slope_is_found_with_its_size(per_week: float) -> None:
    for seed in range(3):
        speed = history(hours(336, seed=seed, per_week=per_week)).speed
        assert speed is not None
        assert speed.is_significant
        # Of the first hour; the level is that of the middle.
        assert speed.per_week / 1e6 == pytest.approx(per_week, abs=0.01)
        assert speed.low < speed.per_week < speed.high


def test_the_interval_holds_the_true_slope_nearly_always() -> None:
    held = 0
    for seed in range(30):
        speed = history(hours(96, seed=seed, per_week=-0.05)).speed
        assert speed is not None
        held += speed.low <= -0.05e6 <= speed.high
    # 95 %: of 30, 24 or fewer would come once in 300.
    assert held > 24


@pytest.mark.parametrize("follows", [0.0, 0.5, 0.8])
def test_noise_shows_no_trend(follows: float) -> None:
    """Also where an hour is much as the one before: that is no slope."""
    wrong = 0
    for seed in range(40):
        speed = history(hours(120, seed=seed, follows=follows, attempt_hours=20)).speed
        assert speed is not None
        wrong += speed.is_significant
    # One in a thousand is meant; three of 40 would come once in 100,000.
    assert wrong <= 2


def test_a_decline_is_a_note_and_says_what_it_costs() -> None:
    found = noted(hours(336, seed=1, per_week=-0.08))
    message = found[Subject.MFU_DECLINE].message
    assert "a week" in message
    assert "a restart may bring it back" in message
    assert Subject.LATE_LAUNCHES not in found


def test_a_decline_that_is_certain_and_small_is_no_note() -> None:
    found = history(hours(336, seed=1, per_week=-0.02, noise=0.001))
    assert found.speed is not None
    assert found.speed.is_significant
    assert not [*findings(found, {})]


def test_what_a_decline_cost_is_half_of_what_was_lost_at_its_end() -> None:
    speed = history(hours(336, seed=1, per_week=-0.1, noise=0.001)).speed
    assert speed is not None
    # Over two weeks from all to 80 %: the mean is 90 %.
    assert speed.lost_ratio == pytest.approx(0.1, abs=0.005)


def test_a_decline_that_every_restart_ends_is_seen_within_attempts() -> None:
    """The whole looks level; each attempt begins at full speed and slows down."""
    level = hours(336, seed=3, noise=0.005)
    made = [
        Hour(
            begun_s=hour.begun_s,
            attempt=number // 24,
            layout="tp1",
            num_steps=700,
            tokens=round(hour.tokens * (1 - 0.002 * (number % 24))),
            seconds=HOUR_S,
            step_s=5.0,
        )
        for number, hour in enumerate(level)
    ]
    found = history(made)
    assert found.speed is not None
    assert found.speed_in_attempts is not None
    assert abs(found.speed.ratio_per_week) < 0.01
    assert found.speed_in_attempts.is_significant
    assert found.speed_in_attempts.ratio_per_week == pytest.approx(-0.002 * 168, rel=0.15)


def test_a_jump_between_attempts_is_no_trend_within_them() -> None:
    made = [
        Hour(
            begun_s=hour.begun_s,
            attempt=number // 168,
            layout="tp1",
            num_steps=700,
            tokens=round(hour.tokens * (1.0 if number < 168 else 0.8)),
            seconds=HOUR_S,
            step_s=5.0,
        )
        for number, hour in enumerate(hours(336, seed=4))
    ]
    inside = history(made).speed_in_attempts
    assert inside is not None
    assert not inside.is_significant


def test_hours_of_another_layout_are_left_out() -> None:
    """A job that shrank is slower, and does not decline."""
    before = hours(200, seed=5, layout="tp1-dp8")
    after = [
        Hour(
            begun_s=hour.begun_s + 200 * HOUR_S,
            attempt=2,
            layout="tp1-dp4",
            num_steps=700,
            tokens=hour.tokens // 2,
            seconds=HOUR_S,
            step_s=5.0,
        )
        for hour in hours(100, seed=6)
    ]
    found = history([*before, *after])
    assert len(found.hours) == 100
    assert found.speed is not None
    assert not found.speed.is_significant


def test_less_than_a_day_is_no_trend_and_says_so() -> None:
    found = history(hours(12, seed=1, per_week=-0.5))
    assert found.speed is None
    assert "12 hours" in found.why_no_trend
    assert not [*findings(found, {})]
    assert history([]).why_no_trend


def test_launches_that_grow_apart_are_a_note() -> None:
    """MegaScale, 6.3: MFU fell while the passes took as long as ever."""
    message = noted(hours(336, seed=2, late_per_week=0.02))[Subject.LATE_LAUNCHES].message
    assert "+2.0% a week" in message
    assert Subject.LATE_LAUNCHES not in noted(hours(336, seed=2, late=0.3))


def test_hours_without_replicas_have_no_lateness() -> None:
    made = [
        Hour(
            begun_s=hour.begun_s,
            attempt=1,
            layout="tp1",
            num_steps=700,
            tokens=hour.tokens,
            seconds=HOUR_S,
            step_s=5.0,
        )
        for hour in hours(100, seed=1)
    ]
    assert history(made).late is None


def test_equal_values_are_no_trend() -> None:
    found = trend(Point(at_s=number * HOUR_S, value=1.0) for number in range(48))
    assert found is not None
    assert (found.per_week, found.p_value) == (0.0, 1.0)


def test_the_order_of_points_does_not_matter() -> None:
    points = [Point(at_s=number * HOUR_S, value=number % 7 + number / 9) for number in range(60)]
    shuffled = random.Random(0).sample(points, len(points))
    assert trend(points) == trend(shuffled)


def test_a_slope_in_a_week_is_that_of_a_week() -> None:
    found = trend(Point(at_s=number * HOUR_S, value=float(number)) for number in range(48))
    assert found is not None
    assert found.per_week == pytest.approx(WEEK_S / HOUR_S)
    assert found.p_value < SIGNIFICANT
