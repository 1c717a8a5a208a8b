"""Late launches, nodes among their peers, and the hours that are kept."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from diagnostics.core.hours import GRACE_S, HourTable, ReadUntil, StepFigures
from diagnostics.core.launches import Launches, LaunchWindow, RankSteps
from diagnostics.core.node_days import NodeDay, of_window

RANKS = 8
NODES = {rank: f"n{rank // 2}" for rank in range(RANKS)}
HOUR_S = 3600.0
BEGUN_S = 472_222 * HOUR_S


def window(
    *, work_s: dict[int, float] | None = None, jitter_s: float = 0.0, seed: int = 0
) -> LaunchWindow:
    """Eight replicas whose common operation takes 0.1 s once the last has entered it."""
    chance = random.Random(seed)
    found = LaunchWindow([range(RANKS)], [range(RANKS)], NODES)
    for _ in range(30):
        works = {rank: 1.0 + (work_s or {}).get(rank, 0.0) for rank in range(RANKS)}
        entered = {rank: works[rank] + chance.random() * jitter_s for rank in range(RANKS)}
        left_s = max(entered.values()) + 0.1
        found.add(
            {
                rank: RankSteps(work_s=works[rank], waited_s=left_s - entered[rank], step_s=left_s)
                for rank in range(RANKS)
            }
        )
    return found


def test_replicas_that_enter_together_are_not_late() -> None:
    found = window().launches()
    assert found is not None
    assert found.spread_s == pytest.approx(0)
    assert found.late_s == pytest.approx(0)


def test_one_slow_rank_is_the_spread_and_its_node_is_named() -> None:
    found = window(work_s={5: 0.3})
    launches = found.launches()
    assert launches is not None
    assert launches.spread_s == pytest.approx(0.3)
    # Seven of eight wait for it.
    assert launches.late_s == pytest.approx(0.3 * 7 / 8)
    nodes = found.nodes()
    assert [node for node, work in nodes.items() if work.is_slowest] == ["n2"]
    assert nodes["n2"].ratio == pytest.approx(1.3)
    assert nodes["n2"].last_ratio == 1.0
    assert nodes["n2"].expected_ratio == 0.25


def test_ranks_that_are_late_in_turn_are_seen_though_none_is_slow() -> None:
    """Collections of garbage at different times: every rank works as long as the others."""
    found = window(jitter_s=0.4)
    launches = found.launches()
    assert launches is not None
    assert launches.spread_s == pytest.approx(0.4 * 7 / 9, rel=0.15)
    assert max(work.ratio for work in found.nodes().values()) == pytest.approx(1.0)


def test_without_replicas_there_is_nothing_to_be_late_for() -> None:
    alone = LaunchWindow([[0], [1]], [[0], [1]], {0: "a", 1: "b"})
    alone.add({rank: RankSteps(work_s=1.0, waited_s=0.0, step_s=1.0) for rank in (0, 1)})
    assert alone.launches() is None


def test_a_group_of_which_some_were_not_heard_is_left_out() -> None:
    part = LaunchWindow([range(RANKS)], [range(RANKS)], NODES)
    part.add({0: RankSteps(work_s=1.0, waited_s=0.5, step_s=1.5)})
    assert part.launches() is None


def test_a_node_that_is_as_the_others_is_not_called_slow() -> None:
    wrong = 0
    for seed in range(50):
        chance = random.Random(seed)
        total = dict.fromkeys(("n0", "n1", "n2", "n3"), 0)
        for _ in range(1000):
            total[chance.choice([*total])] += 1
        for count in total.values():
            day = NodeDay(num_windows=1000, num_slowest=count, expected_slowest=250, ratios=1100.0)
            wrong += day.is_slow(4)
    assert wrong == 0


def test_a_node_that_is_often_the_slowest_is_slow_when_that_costs_something() -> None:
    often = NodeDay(num_windows=100, num_slowest=60, expected_slowest=25, ratios=108.0)
    assert often.is_slow(4)
    assert not often.is_slow(10**30)
    hardly = NodeDay(num_windows=100, num_slowest=100, expected_slowest=25, ratios=100.5)
    assert not hardly.is_slow(4)
    few = NodeDay(num_windows=5, num_slowest=5, expected_slowest=1.25, ratios=10.0)
    assert not few.is_slow(4)


def test_a_window_in_which_nobody_was_compared_is_time_in_service_only() -> None:
    assert of_window(None, 600.0) == NodeDay(service_s=600.0)
    work = window(work_s={5: 0.3}).nodes()["n2"]
    day = of_window(work, 600.0)
    assert (day.num_windows, day.num_slowest, day.expected_ratio) == (1, 1, 0.25)


def rows(
    first: int, count: int, *, attempt: int = 1, at_s: float, tokens: int = 100
) -> list[StepFigures]:
    return [
        StepFigures(
            version=first + number,
            step=first + number,
            attempt=attempt,
            tokens=tokens,
            duration_s=10.0,
            at_s=at_s + 10.0 * number,
        )
        for number in range(count)
    ]


def test_an_hour_is_given_out_once_when_it_is_over() -> None:
    table = HourTable(ReadUntil())
    table.attempt_has(1, "tp1")
    table.take(rows(1, 400, at_s=BEGUN_S))
    table.seen(BEGUN_S + 60, 1, Launches(spread_s=0.2, late_s=0.1, step_s=10, num_samples=30))
    assert table.close(BEGUN_S + HOUR_S)[0] == []
    (hour,), until = table.close(BEGUN_S + HOUR_S + GRACE_S)
    # The first three are of the start.
    assert (hour.begun_s, hour.num_steps, hour.tokens) == (BEGUN_S, 357, 35_700)
    assert (hour.step_s, hour.layout, hour.late_s) == (10.0, "tp1", 0.1)
    # The 361st begins the hour that is still open.
    assert until == ReadUntil(version=360, until_s=BEGUN_S + HOUR_S)
    assert table.close(BEGUN_S + HOUR_S + GRACE_S)[0] == []
    (last,), _ = table.close(BEGUN_S + HOUR_S + GRACE_S, is_last=True)
    assert last.num_steps == 40


def test_a_table_that_goes_on_from_there_makes_the_same_hours() -> None:
    whole = rows(1, 1_000, at_s=BEGUN_S)
    one = HourTable(ReadUntil())
    one.take(whole)
    expected, _ = one.close(BEGUN_S + 10 * HOUR_S)
    for cut in (100, 400, 800):
        table = HourTable(ReadUntil())
        table.take(whole[:cut])
        first, until = table.close(whole[cut - 1].at_s)
        again = HourTable(until)
        again.take(row for row in whole if row.version > until.version)
        rest, _ = again.close(BEGUN_S + 10 * HOUR_S)
        found = [*first, *rest]
        assert [hour.begun_s for hour in found] == [hour.begun_s for hour in expected]
        assert all(one.begun_s < other.begun_s for one, other in pairwise(found))
        # Whoever goes on does not know how many steps an attempt had, and leaves three out.
        assert sum(hour.num_steps for hour in expected) - sum(hour.num_steps for hour in found) in (
            0,
            3,
        )


def test_steps_that_were_passed_and_the_first_of_an_attempt_are_left_out() -> None:
    table = HourTable(ReadUntil())
    table.take(rows(1, 10, at_s=BEGUN_S))
    table.take(rows(11, 10, at_s=BEGUN_S + 500, attempt=2, tokens=0))
    table.take(rows(21, 10, at_s=BEGUN_S + 700, attempt=2))
    found, _ = table.close(0.0, is_last=True)
    assert [(hour.attempt, hour.num_steps) for hour in found] == [(1, 7), (2, 10)]
