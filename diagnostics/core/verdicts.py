"""Judging: a measurement to a finding, and a node's findings to one verdict.

Two rules keep an innocent node from being replaced. A value is compared with
the node's *own* healthy median, by factors that no busy neighbour explains
(fail below 0.5, warn below 0.7: three repeats of one gloo measurement on a
healthy machine spread by 1.6), and a low value from a machine whose CPUs were
fought over is inconclusive. And only `fail` accuses: a check that broke or
could not tell says nothing about the hardware, for or against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diagnostics.core.baseline import MIN_RUNS, Baseline
from diagnostics.core.finding import CheckVerdict, Finding, Localises, Measurement, ThresholdSource

FAIL_BELOW = 0.5
WARN_BELOW = 0.7
# Above this share of the time some task had no CPU: the value then measures the
# neighbours. Idle machines show less than 0.05.
CONTENDED_ABOVE = 0.3

_WORST_FIRST = (
    CheckVerdict.FAIL,
    CheckVerdict.ERROR,
    CheckVerdict.INCONCLUSIVE,
    CheckVerdict.WARN,
    CheckVerdict.PASS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """What all findings of a node come to, and why."""

    verdict: CheckVerdict
    reason: str


def judge(
    measurement: Measurement, baseline: Baseline, node: str, *, is_disturbed: bool = False
) -> Finding:
    """The finding that `measurement` makes in the light of the node's history.

    `is_disturbed` says that a job trains there: a low value is then no sign of a fault.
    """
    if measurement.at_most is not None or not measurement.baseline_key:
        return unjudged(measurement, node)
    expected = baseline.expected(measurement.baseline_key)
    if expected is None:
        known = baseline.num_runs(measurement.baseline_key)
        reason = f"no baseline yet: {known} of {MIN_RUNS} healthy runs known"
        return _finding(measurement, node, verdict=CheckVerdict.PASS, reason=reason)
    return _judge_history(measurement, expected, node, is_disturbed=is_disturbed)


def unjudged(measurement: Measurement, node: str) -> Finding:
    """A value as it was measured, for whoever knows what it should be; a limit is still one."""
    if measurement.at_most is not None:
        return _judge_limit(measurement, measurement.at_most, node)
    return _finding(measurement, node, verdict=CheckVerdict.PASS, reason="")


def unmeasured(
    test: str, node: str, verdict: CheckVerdict, reason: str, *, duration_s: float = 0.0
) -> Finding:
    """The finding of a check that has no value to show."""
    assert verdict in (CheckVerdict.SKIP, CheckVerdict.ERROR, CheckVerdict.INCONCLUSIVE), verdict
    return Finding(
        test=test,
        node=node,
        metric="",
        value=0.0,
        unit="",
        threshold=None,
        threshold_source=ThresholdSource.NONE,
        verdict=verdict,
        localises=Localises.NODE,
        detail=reason,
        duration_s=duration_s,
    )


def is_repeatable(finding: Finding) -> bool:
    """Whether a repeat may clear this failure.

    A slow value may be chance. Wrong data is not: once is enough.
    """
    return (
        finding.verdict is CheckVerdict.FAIL
        and finding.threshold_source is ThresholdSource.OWN_BASELINE
    )


def is_healthy(finding: Finding) -> bool:
    """Whether the value may enter the node's baseline."""
    return finding.verdict is CheckVerdict.PASS


def fold(findings: Sequence[Finding]) -> NodeVerdict:
    """The verdict on the node that `findings` are about.

    The worst finding decides; skipped checks do not count, and a node on which
    nothing was measured is neither cleared nor accused.
    """
    for verdict in _WORST_FIRST:
        found = [finding for finding in findings if finding.verdict is verdict]
        if found:
            return NodeVerdict(verdict=verdict, reason=_explain(verdict, found))
    return NodeVerdict(verdict=CheckVerdict.INCONCLUSIVE, reason="nothing was measured")


def _judge_limit(measurement: Measurement, limit: float, node: str) -> Finding:
    bad = CheckVerdict.FAIL if measurement.bad_is_fault else CheckVerdict.WARN
    verdict = bad if measurement.value > limit else CheckVerdict.PASS
    return _finding(
        measurement,
        node,
        verdict=verdict,
        threshold=limit,
        source=ThresholdSource.SPEC,
        reason=f"at most {limit:g} {measurement.unit} allowed" if verdict is bad else "",
    )


def _judge_history(
    measurement: Measurement, expected: float, node: str, *, is_disturbed: bool
) -> Finding:
    warn_below, fail_below = WARN_BELOW * expected, FAIL_BELOW * expected
    threshold = fail_below if measurement.bad_is_fault else warn_below
    ratio = measurement.value / expected if expected > 0 else 1.0
    reason = f"{ratio:.0%} of its own median {expected:.3g} {measurement.unit}"
    verdict = CheckVerdict.PASS
    if measurement.value < threshold and is_disturbed:
        verdict = CheckVerdict.INCONCLUSIVE
        reason += "; a job trains on this node"
    elif measurement.value < threshold and measurement.contended_ratio > CONTENDED_ABOVE:
        verdict = CheckVerdict.INCONCLUSIVE
        reason += f"; tasks waited for a CPU {measurement.contended_ratio:.0%} of the time"
    elif measurement.value < fail_below and measurement.bad_is_fault:
        verdict = CheckVerdict.FAIL
    elif measurement.value < warn_below:
        verdict = CheckVerdict.WARN
    return _finding(
        measurement,
        node,
        verdict=verdict,
        threshold=threshold,
        source=ThresholdSource.OWN_BASELINE,
        reason=reason,
    )


def _finding(
    measurement: Measurement,
    node: str,
    *,
    verdict: CheckVerdict,
    reason: str,
    threshold: float | None = None,
    source: ThresholdSource = ThresholdSource.NONE,
) -> Finding:
    return Finding(
        test=measurement.test,
        node=node,
        metric=measurement.metric,
        value=measurement.value,
        unit=measurement.unit,
        threshold=threshold,
        threshold_source=source,
        verdict=verdict,
        localises=measurement.localises,
        detail="; ".join(part for part in (measurement.detail, reason) if part),
        duration_s=measurement.duration_s,
        peer=measurement.peer,
        baseline_key=measurement.baseline_key,
        digest=measurement.digest,
        digest_key=measurement.digest_key,
        contended_ratio=measurement.contended_ratio,
    )


def _explain(verdict: CheckVerdict, found: Sequence[Finding]) -> str:
    if verdict is CheckVerdict.PASS:
        return f"{len(found)} values are as they should be"
    first = found[0]
    value = f" is {first.value:.3g} {first.unit}".rstrip() if first.metric else ""
    name = f"{first.test}.{first.metric}" if first.metric else first.test
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{name}{value}: {first.detail}{more}" if first.detail else f"{name}{value}{more}"
