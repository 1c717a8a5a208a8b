"""Steps that are slower than their neighbours at a regular period.

A garbage collection every so many steps, a checkpoint, a job of cron each hour: each makes a step
now and then longer, and an average hides it. A step is slow when it lies far above the median of
its neighbours. Slow steps are then folded by every period that occurs between them, once by their
numbers and once by the clock, and the period counts under which more of them fall on one place
than chance would put there: the binomial tail, times all periods and places that could have been
looked at (Bonferroni). What is found is taken out, and the rest is looked at again.

What does not belong here: which rows are read, and what is done about it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

# Compilation, autotuning and cold caches end within these steps of an attempt.
WARM_UP_STEPS = 3
# Fewer show no period.
LEAST_STEPS = 200
# On each side of a step.
_NEIGHBOURS = 20
# Of the deviations from their medians, and of the median: both must be exceeded.
_SLOW_SPREADS = 6.0
_SLOW_SHARE = 0.05
_NORMAL = 1.4826
# The newest slow steps; with more of them slowness is no exception.
_MOST_SLOW = 400
_LEAST_HITS = 5
# Of the times at which a period says that a step is slow.
_LEAST_KEPT = 0.7
# A step or two between slow ones is a slow phase, not a period.
_SHORTEST_STEPS = 4
# A period must fit into what was seen so many times.
_LEAST_CYCLES = 4
# A stall that has been missed so often in a row is over.
_OVER_CYCLES = 5
# The chance that noise shows any period at all.
SIGNIFICANT = 1e-3
_MOST_FOUND = 3
_MOST_CANDIDATES = 64
# Differences to so many later ones: with three sources, others lie between two of the same.
_AHEAD = 12
_MOST_STARTS = 32
# A stall may begin anywhere in the step that it makes slow.
_TOLERANCE_STEPS = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step, with all the time since the one before ended."""

    step: int
    ended_s: float
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicStall:
    """Steps that are slow again and again."""

    # In steps, or in seconds when the clock makes it.
    period: float
    is_of_steps: bool
    # The newest of them, and when it ended.
    last_step: int
    last_s: float
    # How many were slow of those that should have been.
    num_hits: int
    num_expected: int
    # By so much each of them is longer than its neighbours.
    stall_s: float
    # Of all time.
    lost_ratio: float
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    step: int
    at_s: float
    excess_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Slow steps that one period explains."""

    period: float
    is_of_steps: bool
    hits: tuple[_Slow, ...]
    num_expected: int
    log_p: float


def periodic_stalls(steps: Sequence[StepTime]) -> tuple[PeriodicStall, ...]:
    """What is found in the steps of one attempt in their order, the costliest first."""
    if len(steps) < LEAST_STEPS:
        return ()
    usual_s = median(step.whole_s for step in steps)
    slow = list(_slow(steps))[-_MOST_SLOW:]
    # Of the time in which these are.
    since = slow[0].step if len(slow) == _MOST_SLOW else steps[0].step
    total_s = sum(step.whole_s for step in steps if step.step >= since)
    found: list[PeriodicStall] = []
    num_over = 0
    while len(found) + num_over < _MOST_FOUND:
        fits = [*_of_steps(slow, steps), *_of_seconds(slow, steps, usual_s)]
        best = min(fits, key=lambda fit: fit.log_p, default=None)
        if best is None or best.log_p > math.log(SIGNIFICANT):
            break
        if not _is_over(best, steps[-1]):
            found.append(_stall(best, total_s))
        else:
            num_over += 1
        taken = {hit.step for hit in best.hits}
        slow = [each for each in slow if each.step not in taken]
    return tuple(sorted(found, key=lambda stall: -stall.lost_ratio))


def _is_over(fit: _Fit, newest: StepTime) -> bool:
    """Whether it has not been seen for so long that it has ended."""
    last = fit.hits[-1]
    since = newest.step - last.step if fit.is_of_steps else newest.ended_s - last.at_s
    return since > _OVER_CYCLES * fit.period


def _stall(fit: _Fit, total_s: float) -> PeriodicStall:
    lost_s = sum(hit.excess_s for hit in fit.hits)
    last = fit.hits[-1]
    return PeriodicStall(
        period=fit.period,
        is_of_steps=fit.is_of_steps,
        last_step=last.step,
        last_s=last.ended_s,
        num_hits=len(fit.hits),
        num_expected=fit.num_expected,
        stall_s=lost_s / len(fit.hits),
        lost_ratio=lost_s / total_s,
        p_value=math.exp(min(0.0, fit.log_p)),
    )


def _slow(steps: Sequence[StepTime]) -> Iterator[_Slow]:
    """Steps far above their neighbours; of several in a row, the first with the time of all."""
    usual = _running_medians([step.whole_s for step in steps])
    excess = [step.whole_s - middle for step, middle in zip(steps, usual, strict=True)]
    spread = _NORMAL * median(abs(each) for each in excess)
    begun: _Slow | None = None
    last = -2
    for index, (step, over_s) in enumerate(zip(steps, excess, strict=True)):
        if over_s <= max(_SLOW_SPREADS * spread, _SLOW_SHARE * usual[index]):
            continue
        if begun is not None and index == last + 1:
            begun = _Slow(
                step=begun.step,
                at_s=begun.at_s,
                excess_s=begun.excess_s + over_s,
                ended_s=step.ended_s,
            )
        else:
            if begun is not None:
                yield begun
            # In the middle of where a stall of this step may have begun.
            at_s = step.ended_s - step.whole_s + usual[index] / 2
            begun = _Slow(step=step.step, at_s=at_s, excess_s=over_s, ended_s=step.ended_s)
        last = index
    if begun is not None:
        yield begun


def _running_medians(values: Sequence[float]) -> list[float]:
    """Of each value with its neighbours on both sides."""
    window = sorted(values[: _NEIGHBOURS + 1])
    medians = []
    for index in range(len(values)):
        medians.append(window[len(window) // 2])
        if index + _NEIGHBOURS + 1 < len(values):
            insort(window, values[index + _NEIGHBOURS + 1])
        if index >= _NEIGHBOURS:
            del window[bisect_left(window, values[index - _NEIGHBOURS])]
    return medians


def _of_steps(slow: Sequence[_Slow], steps: Sequence[StepTime]) -> Iterator[_Fit]:
    """Periods in the numbers of steps, which must be met exactly."""
    longest = (steps[-1].step - steps[0].step) // _LEAST_CYCLES
    differences = Counter(
        other.step - one.step
        for index, one in enumerate(slow)
        for other in slow[index + 1 : index + 1 + _AHEAD]
    )
    # Of all periods, with as many places each.
    log_trials = math.log(max(1.0, longest * longest / 2))
    for period, _ in differences.most_common(_MOST_CANDIDATES):
        if not _SHORTEST_STEPS <= period <= longest:
            continue
        (place, _), *_ = Counter(each.step % period for each in slow).most_common(1)
        hits = tuple(each for each in slow if each.step % period == place)
        expected = (hits[-1].step - hits[0].step) // period + 1
        if _is_kept(len(hits), expected):
            log_p = log_trials + _log_tail(len(slow), len(hits), 1 / period)
            yield _Fit(
                period=period, is_of_steps=True, hits=hits, num_expected=expected, log_p=log_p
            )


def _of_seconds(slow: Sequence[_Slow], steps: Sequence[StepTime], usual_s: float) -> Iterator[_Fit]:
    """Periods by the clock, which are met to within a step."""
    tolerance_s = _TOLERANCE_STEPS * usual_s
    span_s = steps[-1].ended_s - steps[0].ended_s
    longest_s, shortest_s = span_s / _LEAST_CYCLES, _SHORTEST_STEPS * 2 * tolerance_s
    if longest_s <= shortest_s:
        return
    # Periods differ when their last places do.
    log_trials = math.log(max(1.0, span_s * longest_s / (2 * tolerance_s**2)))
    for period_s in _common_differences(slow, shortest_s, longest_s, tolerance_s):
        fitted = _tracked(slow, period_s, tolerance_s)
        if fitted is None:
            continue
        period_s, first_s = fitted
        hits = tuple(
            each
            for each in slow
            if abs(each.at_s - first_s - period_s * round((each.at_s - first_s) / period_s))
            <= tolerance_s
        )
        if not hits:
            continue
        expected = round((hits[-1].at_s - hits[0].at_s) / period_s) + 1
        if _is_kept(len(hits), expected):
            chance = min(1.0, 2 * tolerance_s / period_s)
            log_p = log_trials + _log_tail(len(slow), len(hits), chance)
            yield _Fit(
                period=period_s, is_of_steps=False, hits=hits, num_expected=expected, log_p=log_p
            )


def _common_differences(
    slow: Sequence[_Slow], shortest_s: float, longest_s: float, tolerance_s: float
) -> list[float]:
    """The times between slow steps that occur most often, to within the tolerance."""
    differences = sorted(
        apart_s
        for index, one in enumerate(slow)
        for other in slow[index + 1 : index + 1 + _AHEAD]
        if shortest_s <= (apart_s := other.at_s - one.at_s) <= longest_s
    )
    counted: dict[int, tuple[int, float]] = {}
    for apart_s in differences:
        first = bisect_left(differences, apart_s - tolerance_s)
        last = bisect_right(differences, apart_s + tolerance_s)
        bucket = round(apart_s / tolerance_s)
        if last - first > counted.get(bucket, (0, 0.0))[0]:
            counted[bucket] = (last - first, median(differences[first:last]))
    best = sorted(counted.values(), reverse=True)[:_MOST_CANDIDATES]
    return [apart_s for _, apart_s in best]


def _tracked(
    slow: Sequence[_Slow], period_s: float, tolerance_s: float
) -> tuple[float, float] | None:
    """The period made exact, and a place, by the longest run of slow steps that keep it.

    An error of the period grows with every cycle, so the period is fitted anew after each.
    """
    times = [each.at_s for each in slow]
    longest: list[tuple[int, float]] = []
    for start in times[:_MOST_STARTS]:
        chain = _chain(times, start, period_s, tolerance_s)
        if len(chain) > len(longest):
            longest = chain
    return _line(longest) if len(longest) >= _LEAST_HITS else None


def _chain(
    times: Sequence[float], start_s: float, period_s: float, tolerance_s: float
) -> list[tuple[int, float]]:
    chain = [(0, start_s)]
    cycle = misses = 0
    fitted_s, first_s = period_s, start_s
    while misses <= 2:
        cycle += 1
        expected_s = first_s + cycle * fitted_s
        if expected_s > times[-1] + tolerance_s:
            break
        index = bisect_left(times, expected_s)
        nearest = min(times[max(0, index - 1) : index + 1], key=lambda at_s: abs(at_s - expected_s))
        # Where two were met, the third can be off by what both were.
        if abs(nearest - expected_s) > 2 * tolerance_s:
            misses += 1
            continue
        misses = 0
        chain.append((cycle, nearest))
        if len(chain) > 2:
            fitted_s, first_s = _line(chain)
    return chain


def _line(chain: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and start of the least-squares line."""
    count = len(chain)
    middle = sum(cycle for cycle, _ in chain) / count
    middle_s = sum(at_s for _, at_s in chain) / count
    spread = sum((cycle - middle) ** 2 for cycle, _ in chain)
    together = sum((cycle - middle) * (at_s - middle_s) for cycle, at_s in chain)
    return together / spread, middle_s - together / spread * middle


def _is_kept(num_hits: int, num_expected: int) -> bool:
    return num_hits >= _LEAST_HITS and num_hits >= _LEAST_KEPT * num_expected


def _log_tail(count: int, least: int, chance: float) -> float:
    """Logarithm of the chance of `least` or more of `count`."""
    if chance >= 1:
        return 0.0
    terms = [
        math.lgamma(count + 1)
        - math.lgamma(hits + 1)
        - math.lgamma(count - hits + 1)
        + hits * math.log(chance)
        + (count - hits) * math.log1p(-chance)
        for hits in range(least, count + 1)
    ]
    largest = max(terms)
    return largest + math.log(sum(math.exp(term - largest) for term in terms))


def step_times(rows: Iterable[tuple[int, int, float, float, int]]) -> list[StepTime]:
    """The steps of the newest attempt that has enough, without those passed without their batch.

    Rows are step, attempt, end, duration and tokens, by attempt and step. A step's time is that
    since the one before ended, where that is known, so that a stall between two counts.
    """
    attempts: dict[int, list[StepTime]] = {}
    counts = Counter[int]()
    before: tuple[int, int, float] | None = None
    for step, attempt, ended_s, duration_s, tokens in rows:
        counts[attempt] += 1
        whole_s = duration_s
        if before is not None and before[:2] == (attempt, step - 1):
            whole_s = max(duration_s, ended_s - before[2])
        before = (attempt, step, ended_s)
        if tokens and counts[attempt] > WARM_UP_STEPS:
            known = attempts.setdefault(attempt, [])
            known.append(StepTime(step=step, ended_s=ended_s, whole_s=whole_s))
    enough = [attempt for attempt, known in attempts.items() if len(known) >= LEAST_STEPS]
    return attempts[max(enough)] if enough else max(attempts.values(), key=len, default=[])
