"""What-if: each change is run to its end, and changes ETTR in the direction that it must."""

from __future__ import annotations

import pytest

from controller.sim.scenario import Result, Scenario, simulate
from controller.sim.variants import PHASES, Comparison, compare, variants
from outlast.cli.simulation import page

# Thirty faults in a day, and long starts: what a change does is far above chance.
SCENARIO = Scenario(
    nodes=8,
    days=1.0,
    rate=1_000.0,
    mass=0,
    standbys=4,
    durations={"process": 60.0, "nccl": 60.0, "provision": 1_200.0},
)


@pytest.fixture(scope="module")
def comparisons() -> tuple[Comparison, ...]:
    return compare(SCENARIO, processes=1)


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(SCENARIO)


def _change(comparisons: tuple[Comparison, ...], name: str) -> float:
    return next(each.change for each in comparisons if each.name == name)


def test_every_variant_is_compared_and_keeps_the_invariants(
    comparisons: tuple[Comparison, ...],
) -> None:
    assert [each.name for each in comparisons] == [each.name for each in variants(SCENARIO)]
    assert comparisons[0].change == 0.0
    assert [each.violations for each in comparisons] == [()] * len(comparisons)


def test_longer_phases_and_missing_standbys_lower_ettr(
    comparisons: tuple[Comparison, ...],
) -> None:
    assert _change(comparisons, "process start") < -0.01
    assert _change(comparisons, "NCCL start") < -0.01
    assert _change(comparisons, "no standbys") < -0.01
    assert _change(comparisons, "no replicas in host memory") < -0.01


def test_going_on_smaller_makes_up_for_a_part_of_missing_standbys(
    comparisons: tuple[Comparison, ...],
) -> None:
    without = _change(comparisons, "no standbys")
    assert without + 0.01 < _change(comparisons, "no standbys, elastic") < 0.0


def test_the_page_shows_what_each_change_gives(
    comparisons: tuple[Comparison, ...], result: Result
) -> None:
    shown, alone = page.render(result, comparisons), page.render(result, ())
    assert shown.count('aria-label="changes of ETTR"') == 2
    assert "changes of ETTR" not in alone
    for phase in PHASES:
        assert f">{phase}</text>" in shown
    assert f"{100 * _change(comparisons, 'process start'):+.2f} points</text>" in shown
