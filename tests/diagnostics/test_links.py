"""Exchanges between nodes are judged by the fleet itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding, ThresholdSource
from diagnostics.core.links import (
    BANDWIDTH,
    BROKEN,
    WRONG,
    Exchange,
    exchange_of,
    extended,
    link_finding,
    node_finding,
    outcome_of,
    yardstick,
)
from diagnostics.core.search import (
    Outcome,
    PairTest,
    conclude,
    pair_of,
    plan_round,
)
from tests.diagnostics.build import finding

KEY = "pair/gloo/cpu/4194304"
EMPTY = Baseline()


def exchange(one: str, other: str, value: float | None, **changes: object) -> Exchange:
    plain = Exchange(pair=pair_of(one, other), round=0, value=value, baseline_key=KEY)
    return replace(plain, **changes)  # type: ignore[arg-type]  # field values of any type


def mesh(count: int, value_of: dict[str, float], default: float = 1.0) -> list[Exchange]:
    """Every pair of so many nodes; a pair is as slow as the slower of its two nodes."""
    nodes = [f"n{number}" for number in range(count)]
    return [
        exchange(a, b, min(value_of.get(a, default), value_of.get(b, default)))
        for a in nodes
        for b in nodes
        if a < b
    ]


def test_one_slow_node_of_three_does_not_become_the_yardstick() -> None:
    exchanges = mesh(3, {"n0": 0.02})
    stick = yardstick(exchanges, EMPTY)
    assert stick.expected == 1.0
    assert stick.source is ThresholdSource.PEERS
    assert [outcome_of(item, stick) for item in exchanges] == [
        Outcome.BAD,
        Outcome.BAD,
        Outcome.GOOD,
    ]


def test_two_nodes_are_measured_against_the_fleets_earlier_runs() -> None:
    slow = [exchange("n0", "n1", 0.3)]
    assert yardstick(slow, EMPTY).expected is None
    assert outcome_of(slow[0], yardstick(slow, EMPTY)) is Outcome.GOOD
    stick = yardstick(slow, Baseline(runs={KEY: (1.0, 1.1, 0.9)}))
    assert stick.source is ThresholdSource.FLEET_BASELINE
    assert outcome_of(slow[0], stick) is Outcome.BAD


def test_wrong_data_is_bad_however_fast_it_came() -> None:
    fast = exchange("n0", "n1", 9.0, wrong_elements=1.0)
    assert outcome_of(fast, yardstick([fast], EMPTY)) is Outcome.BAD


def test_a_slow_exchange_beside_training_says_nothing_but_wrong_data_does() -> None:
    stick = yardstick(mesh(4, {}), EMPTY)
    slow = exchange("n0", "n1", 0.1, is_disturbed=True)
    assert outcome_of(slow, stick) is Outcome.UNKNOWN
    assert outcome_of(replace(slow, wrong_elements=2.0), stick) is Outcome.BAD


def test_a_busy_machine_explains_a_third_and_not_a_fiftieth() -> None:
    stick = yardstick(mesh(4, {}), EMPTY)
    busy = exchange("n0", "n1", 0.3, contended_ratio=0.6)
    assert outcome_of(busy, stick) is Outcome.UNKNOWN
    assert outcome_of(replace(busy, contended_ratio=0.1), stick) is Outcome.BAD
    assert outcome_of(replace(busy, value=0.02), stick) is Outcome.BAD
    nothing = conclude(["n0", "n1"], [])
    assert "waited for a CPU 60% of" in link_finding(("n0", "n1"), [busy], stick, nothing).detail


@given(
    count=st.integers(3, 8),
    data=st.data(),
)
def test_healthy_values_that_spread_by_less_than_two_name_nobody(
    count: int, data: st.DataObject
) -> None:
    nodes = [f"n{number}" for number in range(count)]
    exchanges: list[Exchange] = []
    tests: list[PairTest] = []
    for number in range(3):
        for one, other in plan_round(nodes, tests):
            value = data.draw(st.floats(0.72, 1.4))
            exchanges.append(exchange(one, other, value, round=number))
        stick = yardstick(exchanges, EMPTY)
        tests = [
            PairTest(pair=item.pair, round=item.round, outcome=outcome_of(item, stick))
            for item in exchanges
        ]
    verdict = conclude(nodes, tests)
    assert verdict.bad_nodes == ()
    assert verdict.bad_links == ()


def pair_finding(metric: str, value: float, **changes: object) -> Finding:
    return finding(
        CheckVerdict.PASS,
        **{
            "test": "pair",
            "node": "a",
            "peer": "b",
            "metric": metric,
            "value": value,
            "detail": "gloo",
            **changes,
        },
    )


def test_only_an_exchange_that_broke_between_two_sound_sides_is_held_against_them() -> None:
    broke = replace(
        pair_finding(BROKEN, 1.0), verdict=CheckVerdict.FAIL, detail="no guest within 20 s"
    )
    also = replace(broke, node="b", detail="timed out")
    died = finding(CheckVerdict.ERROR, node="b", metric="", detail="killed by SIGKILL")

    def judged(*sides: list[Finding] | None) -> tuple[Outcome, str]:
        item = exchange_of(("a", "b"), 0, sides, is_disturbed=False)
        return outcome_of(item, yardstick([item], EMPTY)), item.detail

    assert judged([broke], [also]) == (Outcome.BAD, "a: no guest within 20 s; b: timed out")
    assert judged([broke], None)[0] is Outcome.UNKNOWN
    # The process of one side died, for whatever reason: that is no word on the line.
    assert judged([broke], [died]) == (
        Outcome.UNKNOWN,
        "b: killed by SIGKILL; a: no guest within 20 s",
    )
    assert judged([died], [])[0] is Outcome.UNKNOWN
    good = [pair_finding(BANDWIDTH, 2.0), pair_finding(WRONG, 0.0)]
    assert judged(good, [])[0] is Outcome.GOOD
    # What was measured stands, even if the farewell was lost.
    assert judged([*good, broke], [])[0] is Outcome.GOOD


def test_a_majority_of_bad_nodes_is_no_yardstick_where_the_fleet_was_better() -> None:
    healthy = Baseline(runs={KEY: (1.0, 1.1, 0.9)})
    exchanges = mesh(5, {"n0": 0.02, "n1": 0.02, "n2": 0.02})
    stick = yardstick(exchanges, healthy)
    assert (stick.expected, stick.source) == (1.0, ThresholdSource.FLEET_BASELINE)
    good = [item.pair for item in exchanges if outcome_of(item, stick) is Outcome.GOOD]
    assert good == [("n3", "n4")]
    # What a run of bad nodes was worth is not what healthy ones are worth.
    all_bad = mesh(3, {"n0": 0.02, "n1": 0.02, "n2": 0.02})
    assert extended(healthy, all_bad, yardstick(all_bad, healthy)) == healthy
    # A fleet that is somewhat slower today is measured against itself.
    slower = mesh(5, {}, default=0.6)
    assert yardstick(slower, healthy).source is ThresholdSource.PEERS


def test_reports_name_the_link_and_clear_the_others() -> None:
    nodes = ["n0", "n1", "n2", "n3"]
    exchanges = [
        replace(item, value=0.02) if item.pair == ("n1", "n3") else item for item in mesh(4, {})
    ]
    exchanges += [exchange("n1", "n3", 0.02, round=number) for number in (1, 2)]
    stick = yardstick(exchanges, EMPTY)
    tests = [
        PairTest(pair=item.pair, round=item.round, outcome=outcome_of(item, stick))
        for item in exchanges
    ]
    verdict = conclude(nodes, tests)
    bad = link_finding(("n1", "n3"), exchanges, stick, verdict)
    assert (bad.verdict, bad.node, bad.peer) == (CheckVerdict.FAIL, "n1", "n3")
    assert (bad.value, bad.threshold, bad.threshold_source) == (0.02, 0.5, ThresholdSource.PEERS)
    assert "tried 3 times" in bad.detail
    assert link_finding(("n0", "n1"), exchanges, stick, verdict).verdict is CheckVerdict.PASS


def test_links_of_a_bad_node_are_not_blamed_themselves() -> None:
    nodes = ["n0", "n1", "n2", "n3"]
    exchanges = mesh(4, {"n2": 0.01})
    exchanges += [exchange("n2", other, 0.01, round=1) for other in ("n0", "n1")]
    stick = yardstick(exchanges, EMPTY)
    tests = [
        PairTest(pair=item.pair, round=item.round, outcome=outcome_of(item, stick))
        for item in exchanges
    ]
    verdict = conclude(nodes, tests)
    assert verdict.bad_nodes == ("n2",)
    assert (
        link_finding(("n0", "n2"), exchanges, stick, verdict).verdict is CheckVerdict.INCONCLUSIVE
    )
    named = node_finding("n2", exchanges, stick)
    assert named.verdict is CheckVerdict.FAIL
    assert "every partner (n0, n1, n3)" in named.detail
