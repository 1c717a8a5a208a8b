"""How values become verdicts, and verdicts a word on a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.baseline import KEEP_RUNS, MIN_RUNS, Baseline
from diagnostics.core.finding import CheckVerdict, ThresholdSource
from diagnostics.core.plans import SUITES
from diagnostics.core.verdicts import fold, is_healthy, is_repeatable, judge, unmeasured
from tests.diagnostics.build import KEY, baseline, finding, measurement

HISTORY = baseline(90.0, 100.0, 110.0)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (130.0, CheckVerdict.PASS),
        (100.0, CheckVerdict.PASS),
        (70.0, CheckVerdict.PASS),
        (69.9, CheckVerdict.WARN),
        (50.0, CheckVerdict.WARN),
        (49.9, CheckVerdict.FAIL),
        (0.0, CheckVerdict.FAIL),
    ],
)
def test_value_is_judged_by_the_node_s_own_median(value: float, verdict: CheckVerdict) -> None:
    found = judge(measurement(value), HISTORY, "node-3")
    assert found.verdict is verdict
    assert (found.threshold, found.threshold_source) == (50.0, ThresholdSource.OWN_BASELINE)
    assert found.node == "node-3"
    assert f"{value / 100:.0%} of its own median 100" in found.detail


@pytest.mark.parametrize("known", range(MIN_RUNS))
def test_value_without_enough_history_passes_and_says_so(known: int) -> None:
    found = judge(measurement(1.0), baseline(*[100.0] * known), "node-0")
    assert found.verdict is CheckVerdict.PASS
    assert (found.threshold, found.threshold_source) == (None, ThresholdSource.NONE)
    assert f"{known} of 3 healthy runs known" in found.detail


def test_history_of_another_size_is_not_used() -> None:
    found = judge(measurement(1.0, baseline_key="compute/cpu/1024"), HISTORY, "node-0")
    assert found.threshold_source is ThresholdSource.NONE


def test_slow_value_from_a_contended_machine_is_inconclusive() -> None:
    found = judge(measurement(10.0, contended_ratio=0.8), HISTORY, "node-0")
    assert found.verdict is CheckVerdict.INCONCLUSIVE
    assert "waited for a CPU 80%" in found.detail


def test_good_value_from_a_contended_machine_passes() -> None:
    assert judge(measurement(90.0, contended_ratio=0.8), HISTORY, "n").verdict is CheckVerdict.PASS


def test_slowness_of_something_shared_is_a_warning_at_most() -> None:
    found = judge(measurement(1.0, bad_is_fault=False), HISTORY, "node-0")
    assert (found.verdict, found.threshold) == (CheckVerdict.WARN, 70.0)


@pytest.mark.parametrize(("value", "verdict"), [(0.0, CheckVerdict.PASS), (1.0, CheckVerdict.FAIL)])
def test_wrong_data_fails_whatever_the_history_says(value: float, verdict: CheckVerdict) -> None:
    exact = measurement(value, at_most=0.0, contended_ratio=1.0)
    found = judge(exact, HISTORY, "node-0")
    assert (found.verdict, found.threshold) == (verdict, 0.0)
    assert found.threshold_source is ThresholdSource.SPEC


def test_only_a_slow_value_may_be_cleared_by_a_repeat() -> None:
    assert is_repeatable(judge(measurement(10.0), HISTORY, "n"))
    assert not is_repeatable(judge(measurement(1.0, at_most=0.0), HISTORY, "n"))
    assert not is_repeatable(judge(measurement(60.0), HISTORY, "n"))


def test_only_healthy_values_enter_the_baseline() -> None:
    healthy = [verdict for verdict in CheckVerdict if is_healthy(finding(verdict))]
    assert healthy == [CheckVerdict.PASS]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], CheckVerdict.INCONCLUSIVE),
        ([CheckVerdict.SKIP, CheckVerdict.SKIP], CheckVerdict.INCONCLUSIVE),
        ([CheckVerdict.SKIP, CheckVerdict.PASS], CheckVerdict.PASS),
        ([CheckVerdict.PASS, CheckVerdict.WARN], CheckVerdict.WARN),
        (
            [CheckVerdict.PASS, CheckVerdict.INCONCLUSIVE, CheckVerdict.WARN],
            CheckVerdict.INCONCLUSIVE,
        ),
        ([CheckVerdict.PASS, CheckVerdict.ERROR, CheckVerdict.INCONCLUSIVE], CheckVerdict.ERROR),
        ([CheckVerdict.ERROR, CheckVerdict.PASS, CheckVerdict.FAIL], CheckVerdict.FAIL),
    ],
)
def test_worst_finding_decides_about_the_node(
    verdicts: list[CheckVerdict], expected: CheckVerdict
) -> None:
    assert fold([finding(verdict) for verdict in verdicts]).verdict is expected


@given(st.lists(st.sampled_from(CheckVerdict)))
def test_broken_or_doubtful_checks_neither_clear_nor_accuse(verdicts: list[CheckVerdict]) -> None:
    found = fold([finding(verdict) for verdict in verdicts]).verdict
    assert (found is CheckVerdict.FAIL) == (CheckVerdict.FAIL in verdicts)
    if CheckVerdict.ERROR in verdicts or CheckVerdict.INCONCLUSIVE in verdicts:
        assert found not in (CheckVerdict.PASS, CheckVerdict.WARN)


def test_node_verdict_names_what_decided() -> None:
    bad = finding(CheckVerdict.FAIL, value=31.25, detail="39% of its own median")
    reason = fold([finding(CheckVerdict.PASS), bad, bad]).reason
    assert reason == "compute.matmul_throughput is 31.2 GFLOP/s: 39% of its own median (and 1 more)"


def test_check_that_could_not_run_says_why() -> None:
    found = unmeasured("collectives", "node-0", CheckVerdict.ERROR, "RuntimeError: no route")
    assert fold([found]).reason == "collectives: RuntimeError: no route"
    assert found.threshold_source is ThresholdSource.NONE


def test_baseline_keeps_the_newest_runs_only() -> None:
    kept = Baseline()
    for value in range(KEEP_RUNS + 5):
        kept = kept.with_run(KEY, float(value))
    assert kept.runs[KEY] == tuple(float(value) for value in range(5, KEEP_RUNS + 5))


def test_baseline_survives_its_file() -> None:
    kept = baseline(1.0, 2.0, 3.0).with_run("memory/cpu", 20.0)
    assert Baseline.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "runs": {}}',
        '{"version": 1}',
        '{"version": 1, "runs": {"a": 3}}',
        '{"version": 1, "runs": {"a": ["3"]}}',
        '{"version": 1, "runs": {"a": [NaN]}}',
    ],
)
def test_file_that_is_no_baseline_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own error is one too
        Baseline.from_json(text)


def test_suites_hold_known_checks_with_deadlines() -> None:
    assert set(SUITES) == {"preflight", "on-failure"}
    for name, suite in SUITES.items():
        assert suite.name == name
        names = ["inventory", "gpu", "device", "loopback", "rdma", "collectives", "storage"]
        if name == "preflight":
            # It takes a minute of line rate, too long for every start.
            names.remove("rdma")
        assert [check.name for check in suite.checks] == names
        assert all(check.deadline_s > 0 for check in suite.checks)
        assert suite.deadline_s == sum(check.deadline_s for check in suite.checks)
        assert suite.effort.exact_rounds >= 2


def test_slowness_beside_training_is_inconclusive_and_wrong_data_is_not() -> None:
    slow = judge(measurement(1.0), HISTORY, "node-0", is_disturbed=True)
    assert slow.verdict is CheckVerdict.INCONCLUSIVE
    assert "a job trains on this node" in slow.detail
    wrong = measurement(3.0, at_most=0.0)
    assert judge(wrong, HISTORY, "node-0", is_disturbed=True).verdict is CheckVerdict.FAIL


def test_a_limit_that_proves_no_fault_warns() -> None:
    risen = measurement(2.0, at_most=0.0, bad_is_fault=False)
    assert judge(risen, HISTORY, "node-0").verdict is CheckVerdict.WARN


def test_a_value_without_a_yardstick_is_told_as_it_is() -> None:
    found = judge(measurement(2.0, baseline_key="", detail="two"), HISTORY, "node-0")
    assert (found.verdict, found.detail) == (CheckVerdict.PASS, "two")
