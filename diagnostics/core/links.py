"""Judging exchanges between two nodes: what each was worth, and against what.

The yardstick is the fleet itself: the median, over the nodes, of the best that
each node did in this run. A median of all *exchanges* would not do, since one bad
node spoils most of the exchanges of a small fleet. Where fewer than three nodes
were measured, or where most of them are far below the fleet's earlier healthy
runs, those serve instead: a majority may be bad, too. Without them a slow value
cannot be called slow.

Where CPUs were fought over meanwhile, a value below half of what is expected says
nothing (healthy exchanges on a machine with eight times more work than cores came
to a third of each other); below a tenth it does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding, Localises, ThresholdSource
from diagnostics.core.search import Outcome, Pair, SearchVerdict
from diagnostics.core.verdicts import CONTENDED_ABOVE, FAIL_BELOW

TEST = "pair"
BANDWIDTH = "all_reduce_bandwidth"
WRONG = "wrong_elements"
# The exchange timed out or its connection broke, at a side whose own process was sound.
BROKEN = "broken_exchanges"
# No busy neighbour explains so little.
CONTENDED_FAIL_BELOW = 0.1
# Fewer cannot outvote the one that is bad.
MIN_NODES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one test of a pair gave; `value` is absent when no data was exchanged."""

    pair: Pair
    round: int
    # GB/s.
    value: float | None = None
    wrong_elements: float = 0.0
    baseline_key: str = ""
    duration_s: float = 0.0
    detail: str = ""
    # Both nodes took part to the end, and the exchange broke between them.
    is_broken: bool = False
    # A job trains on one of the two: slowness then proves nothing.
    is_disturbed: bool = False
    # Share of the time in which something waited for a CPU, at the busier end.
    contended_ratio: float = 0.0

    @property
    def is_contended(self) -> bool:
        return self.contended_ratio > CONTENDED_ABOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What an exchange should give, and how that is known."""

    expected: float | None
    source: ThresholdSource

    @property
    def threshold(self) -> float | None:
        """Below this an exchange has failed."""
        return None if self.expected is None else FAIL_BELOW * self.expected


def exchange_of(
    pair: Pair, number: int, sides: Sequence[Sequence[Finding] | None], *, is_disturbed: bool
) -> Exchange:
    """What the two sides of a test said; None for a side that did not answer."""
    reported = [finding for side in sides if side is not None for finding in side]
    by_metric = {finding.metric: finding for finding in reported}
    value, wrong = by_metric.get(BANDWIDTH), by_metric.get(WRONG)
    # A side whose process died, or never got going, is why the other one saw nothing of it.
    died = [finding for finding in reported if finding.verdict is CheckVerdict.ERROR]
    broke = [finding for finding in reported if finding.metric == BROKEN]
    took_part = all(side is not None for side in sides) and not died
    measured = value is not None and wrong is not None
    said = "; ".join(f"{finding.node}: {finding.detail}" for finding in (*died, *broke))
    return Exchange(
        pair=pair,
        round=number,
        value=value.value if value is not None and measured else None,
        wrong_elements=wrong.value if wrong is not None else 0.0,
        baseline_key=value.baseline_key if value is not None else "",
        duration_s=max((finding.duration_s for finding in reported), default=0.0),
        detail=(value.detail if value is not None and measured else said) or "no answer",
        is_broken=took_part and not measured and bool(broke),
        is_disturbed=is_disturbed,
        contended_ratio=value.contended_ratio if value is not None else 0.0,
    )


def yardstick(exchanges: Iterable[Exchange], baseline: Baseline) -> Yardstick:
    """What the exchanges of a run are measured against."""
    best: dict[str, float] = {}
    keys: dict[str, None] = {}
    for exchange in exchanges:
        if exchange.value is None:
            continue
        keys[exchange.baseline_key] = None
        for node in exchange.pair:
            best[node] = max(best.get(node, 0.0), exchange.value)
    known = [value for key in keys if (value := baseline.expected(key)) is not None]
    earlier = min(known, default=None)
    if len(best) >= MIN_NODES:
        peers = statistics.median(best.values())
        if earlier is None or peers >= FAIL_BELOW * earlier:
            return Yardstick(expected=peers, source=ThresholdSource.PEERS)
    if earlier is None:
        return Yardstick(expected=None, source=ThresholdSource.NONE)
    return Yardstick(expected=earlier, source=ThresholdSource.FLEET_BASELINE)


def outcome_of(exchange: Exchange, stick: Yardstick) -> Outcome:
    """Whether an exchange speaks for or against its two nodes and their link."""
    if exchange.is_broken or exchange.wrong_elements > 0:
        return Outcome.BAD
    if exchange.value is None:
        return Outcome.UNKNOWN
    if stick.expected is None or exchange.value >= FAIL_BELOW * stick.expected:
        return Outcome.GOOD
    is_explained = exchange.is_contended and (
        exchange.value >= CONTENDED_FAIL_BELOW * stick.expected
    )
    return Outcome.UNKNOWN if exchange.is_disturbed or is_explained else Outcome.BAD


def extended(baseline: Baseline, exchanges: Sequence[Exchange], stick: Yardstick) -> Baseline:
    """The baseline plus what the good exchanges of a run were typically worth."""
    good: dict[str, list[float]] = {}
    for exchange in exchanges:
        is_norm = exchange.baseline_key and not exchange.is_disturbed
        if exchange.value is None or not is_norm:
            continue
        if outcome_of(exchange, stick) is Outcome.GOOD:
            good.setdefault(exchange.baseline_key, []).append(exchange.value)
    for key, values in good.items():
        baseline = baseline.with_run(key, statistics.median(values))
    return baseline


def link_finding(
    pair: Pair, exchanges: Sequence[Exchange], stick: Yardstick, verdict: SearchVerdict
) -> Finding:
    """The report on one link: its best exchange, and what the search made of it."""
    tried = [exchange for exchange in exchanges if exchange.pair == pair]
    assert tried, pair
    best = max(tried, key=lambda exchange: exchange.value or 0.0)
    judged, why = _verdict_on(pair, tried, stick, verdict)
    one, other = pair
    return Finding(
        test=TEST,
        node=one,
        peer=other,
        metric=BANDWIDTH if best.value is not None else "",
        value=best.value or 0.0,
        unit="GB/s" if best.value is not None else "",
        threshold=stick.threshold if best.value is not None else None,
        threshold_source=stick.source if best.value is not None else ThresholdSource.NONE,
        verdict=judged,
        localises=Localises.LINK,
        detail="; ".join(part for part in (why, best.detail) if part),
        duration_s=sum(exchange.duration_s for exchange in tried),
        baseline_key=best.baseline_key,
    )


def node_finding(node: str, exchanges: Sequence[Exchange], stick: Yardstick) -> Finding:
    """The report on a node that the search has named."""
    tried = [exchange for exchange in exchanges if node in exchange.pair]
    partners = sorted({other for exchange in tried for other in exchange.pair} - {node})
    values = [exchange.value for exchange in tried if exchange.value is not None]
    wrong = sum(exchange.wrong_elements for exchange in tried)
    what = f"; {wrong:.0f} elements were wrong" if wrong else ""
    return Finding(
        test=TEST,
        node=node,
        metric=BANDWIDTH if values else "",
        value=max(values, default=0.0),
        unit="GB/s" if values else "",
        threshold=stick.threshold if values else None,
        threshold_source=stick.source if values else ThresholdSource.NONE,
        verdict=CheckVerdict.FAIL,
        localises=Localises.NODE,
        detail=f"failed with every partner ({', '.join(partners)}), which work with others{what}",
        duration_s=0.0,
    )


def _verdict_on(
    pair: Pair, tried: Sequence[Exchange], stick: Yardstick, verdict: SearchVerdict
) -> tuple[CheckVerdict, str]:
    times = f"{len(tried)} time{'' if len(tried) == 1 else 's'}"
    if pair in verdict.bad_links:
        return (
            CheckVerdict.FAIL,
            f"tried {times} and never good, while both ends are good with others",
        )
    if pair in verdict.unsteady_links:
        return CheckVerdict.WARN, f"tried {times}: it failed, and not again"
    outcomes = [outcome_of(exchange, stick) for exchange in tried]
    if Outcome.GOOD in outcomes:
        return (
            CheckVerdict.PASS,
            "" if stick.expected else "no yardstick yet: too few nodes and runs",
        )
    blamed = [node for node in pair if node in verdict.bad_nodes]
    if blamed:
        return CheckVerdict.INCONCLUSIVE, f"says nothing of the link, since {blamed[0]} is bad"
    if Outcome.BAD in outcomes:
        return CheckVerdict.INCONCLUSIVE, "failed; node and link cannot be told apart"
    if any(exchange.is_disturbed and exchange.value is not None for exchange in tried):
        return CheckVerdict.INCONCLUSIVE, "slow, but a job trains on one of the two nodes"
    busiest = max(exchange.contended_ratio for exchange in tried)
    if busiest > CONTENDED_ABOVE and any(exchange.value is not None for exchange in tried):
        why = f"slow, but tasks waited for a CPU {busiest:.0%} of the time"
        return CheckVerdict.INCONCLUSIVE, why
    return CheckVerdict.INCONCLUSIVE, "could not be tested"
