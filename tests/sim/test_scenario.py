"""`outlast simulate` without its command line: sums, bounds, replays and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.sim.durations import Duration, durations_for, nccl_start
from controller.sim.mixes import MIXES
from controller.sim.scenario import Scenario, simulate
from controller.sim.shrink import shrink
from controller.sim.variants import PHASES, small, variants

# Four faults a day for a job of 24 nodes.
SMALL = Scenario(nodes=24, days=2.0, rate=40.0, mass=1, standbys=4)


def test_the_parts_sum_to_the_wall_time_and_nobody_was_needed() -> None:
    result = simulate(SMALL)
    assert result.violations == ()
    assert result.incidents > 0
    assert result.by_person == 0
    assert sum(result.parts_s.values()) == pytest.approx(result.wall_s)
    assert min(result.parts_s.values()) >= 0.0
    assert 0.5 < result.ettr < 1.0


def test_a_smaller_job_trains_more_slowly_and_more_than_one_that_waits() -> None:
    """There is no standby, and a new node takes two hours."""
    waits = replace(SMALL, standbys=0, mass=0, durations={"provision": 7200.0})
    waiting, smaller = simulate(waits), simulate(replace(waits, elastic=True))
    assert waiting.violations == smaller.violations == ()
    assert waiting.full_ettr == pytest.approx(waiting.ettr)
    # Time at a smaller size is productive, and brings fewer steps.
    assert smaller.full_ettr < smaller.ettr - 0.001
    assert smaller.full_ettr > waiting.full_ettr + 0.01
    assert smaller.parts_s["provision"] < waiting.parts_s["provision"]
    assert sum(smaller.parts_s.values()) == pytest.approx(smaller.wall_s)
    assert min(smaller.parts_s.values()) >= 0.0


def test_a_scenario_replays_exactly() -> None:
    assert simulate(SMALL) == simulate(SMALL)


def test_without_faults_only_the_start_and_checkpoints_cost() -> None:
    result = simulate(Scenario(nodes=8, days=1.0, only=()))
    assert result.incidents == 0
    assert result.ettr > 0.98


@pytest.mark.parametrize("name", sorted(durations_for(1024)))
def test_a_duration_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="above zero: nothing in a recovery is free"):
        Scenario(durations={name: 0.0})


def test_a_duration_must_have_bounds_above_zero() -> None:
    with pytest.raises(ValueError, match="nothing in a recovery is free"):
        Duration(what="wishful", least_s=0.0, most_s=1.0, source="none")


@pytest.mark.parametrize(
    "changes", [{"mix": "llama9"}, {"nodes": 0}, {"days": -1.0}, {"durations": {"luck": 1.0}}]
)
def test_a_scenario_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"llama9|nodes|days|luck"):
        Scenario(**changes)  # type: ignore[arg-type]


def test_every_mix_and_duration_names_its_source() -> None:
    assert all(mix.source for mix in MIXES.values())
    assert all(each.source for each in durations_for(16_384).values())


def test_mixes_have_the_published_counts() -> None:
    """Llama 3, table 5: 419 unexpected interruptions; FT-HSDP: 678, of which 678 are listed."""
    assert MIXES["llama3"].total == 419
    assert MIXES["ft-hsdp"].total == 678
    assert MIXES["llama3"].per_1000_node_days == pytest.approx(419 / 54 / 2.048, rel=0.01)


def test_nccl_takes_what_was_published_at_its_scales() -> None:
    for gpus, mean_s in ((16_384, 17.0), (22_528, 30.0), (65_536, 100.0), (98_304, 200.0)):
        assert nccl_start(gpus).expected_s == pytest.approx(mean_s)


def test_each_phase_and_policy_has_a_variant() -> None:
    found = variants(Scenario(nodes=1536))
    assert [each.name for each in found if each.kind == "twice as long"] == list(PHASES)
    words = " ".join(each.name for each in found if each.kind == "policy")
    changed = ("storage", "standbys", "heartbeat", "replicas", "elastic")
    assert all(word in words for word in changed)
    every = {name for names in PHASES.values() for name in names}
    # Killing workers and storing in the background cost too little to be a phase.
    assert set(durations_for(1024)) - every == {"stop", "upload"}


def test_a_failing_run_is_shrunk_to_what_it_takes() -> None:
    assert shrink(tuple(range(20)), lambda only: {3, 17} <= set(only)) == (3, 17)
    assert shrink(tuple(range(7)), lambda _only: True) == ()


def test_a_comparison_takes_no_more_faults_than_it_needs() -> None:
    assert small(Scenario(nodes=1536, days=54.0)).days == 54.0
    tried = small(Scenario(nodes=12_500, days=54.0))
    assert (tried.nodes, tried.num_gpus) == (128, 100_000)
    assert tried.days * tried.nodes * tried.node_faults_per_day == pytest.approx(400, rel=0.01)


def test_whoever_waits_hears_how_far_it_is() -> None:
    heard: list[tuple[float, str]] = []
    simulate(SMALL, report=lambda days, how: heard.append((days, how)))
    days = [each for each, _ in heard]
    assert days == sorted(days)
    assert days[-1] == pytest.approx(SMALL.days)
    assert "ETTR" in heard[-1][1]
