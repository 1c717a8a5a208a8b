"""Steps that are slow at a regular period: planted ones are found, noise shows none."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from diagnostics.core.history import Subject, describe, findings, history
from diagnostics.core.periods import (
    WARM_UP_STEPS,
    PeriodicStall,
    StepTime,
    periodic_stalls,
    step_times,
)

BEGUN_S = 1_700_000_000.0


def steps(
    count: int,
    *,
    seed: int = 0,
    step_s: float = 1.0,
    noise: float = 0.02,
    tails: float = 0.0,
    every: Sequence[tuple[int, float]] = (),
    each_s: tuple[float, float] | None = None,
) -> list[StepTime]:
    """Steps with stalls every so many of them, or each so many seconds, of so many seconds."""
    chance = random.Random(seed)
    at_s, made = BEGUN_S, []
    due_s = BEGUN_S + (each_s[0] / 3 if each_s else 0)
    for step in range(1, count + 1):
        whole_s = step_s * chance.lognormvariate(0, noise)
        if chance.random() < tails:
            whole_s += step_s * chance.expovariate(1)
        whole_s += sum(stall_s for period, stall_s in every if step % period == 7 % period)
        if each_s is not None and at_s + whole_s >= due_s:
            whole_s += each_s[1]
            due_s += each_s[0]
        at_s += whole_s
        made.append(StepTime(step=step, ended_s=at_s, whole_s=whole_s))
    return made


def by_steps(found: Sequence[PeriodicStall]) -> dict[float, PeriodicStall]:
    return {each.period: each for each in found if each.is_of_steps}


@pytest.mark.parametrize("period", [10, 50, 137, 500])
def test_a_collection_every_so_many_steps_is_found(period: int) -> None:
    (found,) = periodic_stalls(steps(5_000, tails=0.01, every=[(period, 0.4)]))
    assert (found.period, found.is_of_steps) == (period, True)
    assert found.stall_s == pytest.approx(0.4, abs=0.1)
    assert found.lost_ratio == pytest.approx(0.4 / period, rel=0.3)
    assert found.last_step % period == 7 % period
    assert found.num_hits >= 0.9 * found.num_expected


def test_a_job_of_cron_each_hour_is_found_by_the_clock() -> None:
    (found,) = periodic_stalls(steps(10_000, step_s=5.0, tails=0.01, each_s=(3600.0, 12.0)))
    assert not found.is_of_steps
    assert found.period == pytest.approx(3600, abs=5)
    assert found.stall_s == pytest.approx(12, abs=1)
    assert found.lost_ratio == pytest.approx(12 / 3612, rel=0.1)


def test_several_sources_are_told_apart_and_the_costliest_is_first() -> None:
    made = steps(
        10_000, step_s=5.0, tails=0.005, every=[(40, 1.0), (250, 9.0)], each_s=(3600.0, 15.0)
    )
    found = periodic_stalls(made)
    assert set(by_steps(found)) == {40, 250}
    assert [each.lost_ratio for each in found] == sorted(
        (each.lost_ratio for each in found), reverse=True
    )
    assert any(each.period == pytest.approx(3600, abs=5) for each in found)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("tails", [0.0, 0.02, 0.1])
def test_noise_shows_no_period(noise: float, tails: float) -> None:
    """The stated rate is one in a thousand: of 9 x 12 histories, two would come once in 200."""
    wrong = [
        found
        for seed in range(12)
        if (found := periodic_stalls(steps(2_000, seed=seed, noise=noise, tails=tails)))
    ]
    assert len(wrong) <= 1


def test_slow_phases_are_no_period() -> None:
    """A neighbour that works for a while now and then makes many steps in a row slow."""
    for seed in range(12):
        chance = random.Random(seed)
        made, at_s, left = [], BEGUN_S, 0
        for step in range(1, 3_001):
            if left == 0 and chance.random() < 0.005:
                left = chance.randrange(3, 15)
            whole_s = chance.lognormvariate(0, 0.02) * (1.3 if left else 1.0)
            left = max(0, left - 1)
            at_s += whole_s
            made.append(StepTime(step=step, ended_s=at_s, whole_s=whole_s))
        assert periodic_stalls(made) == ()


def test_a_stall_that_has_ended_is_over_once_it_has_left_the_steps() -> None:
    assert periodic_stalls(steps(3_000, every=[(50, 0.5)]))
    assert periodic_stalls(steps(3_000)) == ()
    # And before, once it has been missed some times.
    ended = steps(6_000, every=[(50, 0.5)])[:3_000]
    later = steps(6_000)[3_000:]
    assert periodic_stalls([*ended, *later]) == ()


def test_of_several_attempts_the_newest_that_is_long_enough_counts() -> None:
    rows = [(step, 1 + (step > 800), BEGUN_S + step, 1.0, 8) for step in range(1, 1_101)]
    assert {each.step > 800 for each in step_times(rows)} == {True}
    short = [row for row in rows if row[0] < 900]
    assert {each.step > 800 for each in step_times(short)} == {False}


def test_few_steps_show_no_period() -> None:
    assert periodic_stalls(steps(150, every=[(10, 1.0)])) == ()


def test_a_costly_stall_is_a_note_unless_a_setting_explains_it() -> None:
    found = history([], periodic_stalls(steps(4_000, every=[(50, 2.0)])))
    (note,) = findings(found, {"eval.interval_steps": 40})
    assert note.subject is Subject.PERIODIC_STALL
    assert "a step every 50 steps takes 2 s longer" in note.message
    assert not [*findings(found, {"eval.interval_steps": 50})]
    said = describe(found.stalls[0], {"eval.interval_steps": 50})
    assert "every 50 steps (as eval.interval_steps)" in said


def test_what_two_settings_share_is_explained_by_both() -> None:
    made = [
        StepTime(step=step, ended_s=BEGUN_S + 1.2 * step, whole_s=whole_s)
        for step in range(1, 9_001)
        for whole_s in (1.0 + 30 * (step % 200 == 0) + 30 * (step % 300 == 0),)
    ]
    found = history([], periodic_stalls(made))
    settings = {"checkpoint.storage_interval_steps": 200, "eval.interval_steps": 300}
    assert len(found.stalls) > 1
    assert not [*findings(found, settings)]
    assert [*findings(found, {"eval.interval_steps": 70})]


def test_a_frequent_stall_costs_what_it_costs() -> None:
    (found,) = periodic_stalls(steps(10_000, every=[(10, 0.5)]))
    assert found.lost_ratio == pytest.approx(0.05 / 1.05, rel=0.1)


def test_a_cheap_stall_is_shown_and_no_note() -> None:
    cheap = history([], periodic_stalls(steps(4_000, every=[(500, 0.5)])))
    assert cheap.stalls
    assert not [*findings(cheap, {})]


def test_the_first_steps_of_an_attempt_and_those_left_out_are_no_steps() -> None:
    rows = [(step, 1, BEGUN_S + step, 0.9, 0 if step == 9 else 100) for step in range(1, 21)]
    times = step_times(rows)
    expected = [step for step in range(1 + WARM_UP_STEPS, 21) if step != 9]
    assert [each.step for each in times] == expected


def test_what_lies_between_two_steps_belongs_to_the_later_one() -> None:
    rows = [(step, 1, BEGUN_S + step + (5.0 if step >= 10 else 0.0), 0.9, 1) for step in range(20)]
    assert {each.step: each.whole_s for each in step_times(rows)}[10] == pytest.approx(6.0)


def test_the_pause_between_two_attempts_is_no_stall() -> None:
    rows = [(step, 1, BEGUN_S + step, 0.9, 1) for step in range(10)]
    rows += [(step, 2, BEGUN_S + 500 + step, 0.9, 1) for step in range(10, 40)]
    times = step_times(rows)
    assert {each.step for each in times} == set(range(10 + WARM_UP_STEPS, 40))
    assert max(each.whole_s for each in times) == pytest.approx(1.0)
