"""Exchanges between nodes are judged by the fleet itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import Finding, ThresholdSource, Verdict
from diagnostics.core.links import (
    BANDWIDTH,
    WRONG,
    Exchange,
    exchange_of,
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
        Verdict.PASS,
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


def test_a_side_that_does_not_answer_is_not_held_against_the_pair() -> None:
    trouble = finding(Verdict.ERROR, node="a", metric="", detail="no guest within 20 s")
    asked = (("a", "b"), 0)
    silent = exchange_of(*asked, [[trouble], None], is_disturbed=False)
    assert outcome_of(silent, yardstick([silent], EMPTY)) is Outcome.UNKNOWN
    both = exchange_of(
        *asked, [[trouble], [replace(trouble, node="b", detail="timed out")]], is_disturbed=False
    )
    assert outcome_of(both, yardstick([both], EMPTY)) is Outcome.BAD
    assert both.detail == "a: no guest within 20 s; b: timed out"
    good = exchange_of(
        *asked, [[pair_finding(BANDWIDTH, 2.0), pair_finding(WRONG, 0.0)], []], is_disturbed=False
    )
    assert good.value == 2.0
    assert outcome_of(good, yardstick([good], EMPTY)) is Outcome.GOOD


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
    assert (bad.verdict, bad.node, bad.peer) == (Verdict.FAIL, "n1", "n3")
    assert (bad.value, bad.threshold, bad.threshold_source) == (0.02, 0.5, ThresholdSource.PEERS)
    assert "tried 3 times" in bad.detail
    assert link_finding(("n0", "n1"), exchanges, stick, verdict).verdict is Verdict.PASS


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
    assert link_finding(("n0", "n2"), exchanges, stick, verdict).verdict is Verdict.INCONCLUSIVE
    named = node_finding("n2", exchanges, stick)
    assert named.verdict is Verdict.FAIL
    assert "every partner (n0, n1, n3)" in named.detail
