"""The rows of the chaos matrix, and what a subset of them covers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.matrix import (
    WITHOUT_VICTIM,
    Fault,
    LayoutName,
    Moment,
    Row,
    Victim,
    full,
    has_meaning,
    named,
    pairs,
    subset,
)
from tests.chaos.orders import orders_for

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_subset_covers_every_pair_that_means_something(seed: int) -> None:
    covered = {pair for row in subset(seed) for pair in pairs(row)}
    assert covered == {pair for row in full() for pair in pairs(row)}


@pytest.mark.parametrize("seed", SEEDS)
def test_subset_has_every_fault_and_every_moment_and_stays_small(seed: int) -> None:
    rows = subset(seed)
    assert {row.fault for row in rows} == set(Fault)
    assert {row.moment for row in rows} == set(Moment)
    # What fits into minutes.
    assert len(rows) <= 52


@pytest.mark.parametrize("seed", SEEDS)
def test_the_brief_subset_has_every_property_and_a_row_for_each_fault(seed: int) -> None:
    rows = subset(seed, is_brief=True)
    assert {row.moment for row in rows} == set(Moment)
    assert {row.layout for row in rows} == {row.layout for row in full()}
    assert {row.victim for row in rows} == set(Victim)
    assert sorted(row.fault for row in rows) == sorted(Fault)


def test_seed_chooses_the_rows_and_always_the_same() -> None:
    assert subset(1) == subset(1)
    assert subset(1) != subset(2)


def test_a_hundred_seeds_see_every_fault_at_every_moment() -> None:
    seen = {(row.fault, row.moment) for seed in range(100) for row in subset(seed)}
    assert seen == {(row.fault, row.moment) for row in full()}


def test_what_strikes_no_rank_has_no_victim_and_all_else_has() -> None:
    for row in full():
        assert (row.victim is Victim.NOBODY) == (row.fault in WITHOUT_VICTIM)


def test_faults_of_a_step_need_a_step() -> None:
    row = Row(Fault.NAN, Moment.STEADY, LayoutName.DP2, Victim.LAST)
    assert has_meaning(row)
    assert has_meaning(replace(row, moment=Moment.UPLOAD))
    for moment in (Moment.START, Moment.RESTORE, Moment.DIAGNOSIS, Moment.TWICE):
        assert not has_meaning(replace(row, moment=moment))


def test_every_row_can_be_asked_for_by_its_name() -> None:
    rows = full()
    assert len({row.name for row in rows}) == len(rows)
    assert named("sigkill@steady/dp2/last", rows) in rows
    with pytest.raises(ValueError, match="no such row"):
        named("sigkill@night/dp2/last", rows)


def test_every_row_orders_its_fault_or_holds_somebody_until_it_strikes() -> None:
    for row in full():
        names = [order.name for order in orders_for(row)]
        assert ("strike" in names) == (row.moment is not Moment.DIAGNOSIS)
        assert len(set(names)) == len(names)
