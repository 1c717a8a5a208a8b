"""What weeks of a job's hours, and its newest steps, show: trends, stalls, and findings.

An hour is what is kept of the steps that ended in it. Hours of another layout than the newest are
left out: its speed is another. So are steps whose batch was passed, and the first ones of an
attempt. MFU is model FLOPs per second over a peak, both fixed for a layout, so its relative change
is that of tokens per second.

What does not belong here: the statistics themselves (`trends`, `periods`, `launches`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.core.periods import PeriodicStall
from diagnostics.core.trends import LEAST_POINTS, LEAST_SPAN_S, Point, Trend, trend

HOUR_S = 3600.0
# The newest two weeks: the job of a month ago may have been another one's neighbour.
MOST_HOURS = 336
# With fewer steps, or less training, an hour's median is chance.
_LEAST_STEPS = 5
# What is worth a note, if it is more than chance: of MFU a week, of all time, of a step a week.
MFU_DECLINE = 0.05
STALL_COST = 0.02
LATE_GROWTH = 0.01


class Subject(StrEnum):
    """What a finding is about; the causes of incidents have the same words."""

    MFU_DECLINE = "mfu_decline"
    PERIODIC_STALL = "periodic_stall"
    LATE_LAUNCHES = "late_launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """What is kept of the steps of one attempt that ended in an hour."""

    begun_s: float
    attempt: int
    # Empty when it is not known: from before it was noted.
    layout: str
    num_steps: int
    tokens: int
    # Sum and median of the steps' own times.
    seconds: float
    step_s: float
    # Of replicas in a step; None where that was not seen.
    spread_s: float | None = None
    late_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Within steps."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def late_ratio(self) -> float | None:
        """The share of a step for which a rank waits for those that enter late."""
        return None if self.late_s is None or self.step_s <= 0 else self.late_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a job's past shows."""

    # Of tokens per second, so of MFU: over all, and within attempts alone.
    speed: Trend | None
    speed_in_attempts: Trend | None
    # Of the share of a step that late ranks cost.
    late: Trend | None
    stalls: tuple[PeriodicStall, ...]
    hours: tuple[Hour, ...]

    @property
    def why_no_trend(self) -> str:
        """In words; "" when there is one."""
        if self.speed is not None:
            return ""
        known = [hour.begun_s for hour in self.hours]
        span_s = max(known) - min(known) if known else 0.0
        return (
            f"{len(known)} hours with steps of the present layout over {span_s / HOUR_S:.0f} h; "
            f"a trend needs {LEAST_POINTS} over {LEAST_SPAN_S / HOUR_S:.0f} h"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that costs enough to say so."""

    subject: Subject
    message: str


def history(hours: Iterable[Hour], stalls: Sequence[PeriodicStall] = ()) -> History:
    """What these hours show, whatever their order; `stalls` are of the newest steps."""
    kept = sorted(hours, key=lambda hour: (hour.begun_s, hour.attempt))
    layout = kept[-1].layout if kept else ""
    kept = [hour for hour in kept if hour.layout == layout and hour.num_steps >= _LEAST_STEPS]
    kept = kept[-MOST_HOURS:]
    return History(
        speed=trend(Point(at_s=hour.begun_s, value=hour.tokens_per_s) for hour in kept),
        speed_in_attempts=trend(
            Point(at_s=hour.begun_s, value=hour.tokens_per_s, block=hour.attempt) for hour in kept
        ),
        late=trend(
            Point(at_s=hour.begun_s, value=ratio)
            for hour in kept
            if (ratio := hour.late_ratio) is not None
        ),
        stalls=tuple(stalls),
        hours=tuple(kept),
    )


def findings(found: History, known_periods: Mapping[str, int]) -> Iterator[Finding]:
    """What is worth a note. `known_periods` are settings that make something happen every so
    many steps: a stall that one of them explains is meant to be there."""
    if declines(found):
        assert found.speed is not None
        yield Finding(subject=Subject.MFU_DECLINE, message=_decline(found, found.speed))
    for stall in found.stalls:
        if stall.lost_ratio >= STALL_COST and not setting_of(stall, known_periods):
            message = describe(stall, known_periods)
            yield Finding(subject=Subject.PERIODIC_STALL, message=message)
    late = found.late
    if late is not None and late.is_significant and late.per_week >= LATE_GROWTH:
        message = (
            f"replicas enter their common operations further and further apart: waiting for the "
            f"last takes {late.level:.1%} of a step, {late.per_week:+.1%} a week "
            f"({late.low:+.1%} to {late.high:+.1%})"
        )
        yield Finding(subject=Subject.LATE_LAUNCHES, message=message)


def declines(found: History) -> bool:
    """Whether MFU falls by more than chance and by enough."""
    speed = found.speed
    return speed is not None and speed.is_significant and speed.ratio_per_week <= -MFU_DECLINE


def setting_of(stall: PeriodicStall, known_periods: Mapping[str, int]) -> str:
    """The setting that makes something happen as often; "" for none."""
    # Of two settings, the steps that both meet are found as the one's, and the other's remain: at
    # the multiples of both. What comes behind a step is counted with the next.
    intervals = [steps for steps in known_periods.values() if steps > 1]
    names = (
        name
        for name, steps in known_periods.items()
        if steps > 1
        and any(stall.period == math.lcm(steps, other) for other in intervals)
        and (stall.period == steps or stall.last_step % steps in (0, 1))
    )
    return next(names, "") if stall.is_of_steps else ""


def describe(stall: PeriodicStall, known_periods: Mapping[str, int]) -> str:
    """A periodic stall in a sentence."""
    every = f"every {stall.period:g} steps" if stall.is_of_steps else f"every {stall.period:.4g} s"
    setting = setting_of(stall, known_periods)
    as_is = f" (as {setting})" if setting else ""
    return (
        f"a step {every}{as_is} takes {stall.stall_s:.3g} s longer, which costs "
        f"{stall.lost_ratio:.1%} of the time; {stall.num_hits} of {stall.num_expected} seen, last "
        f"at step {stall.last_step}"
    )


def _decline(found: History, speed: Trend) -> str:
    level = speed.level or 1.0
    bounds = f"{speed.low / level:+.1%} to {speed.high / level:+.1%}"
    inside = found.speed_in_attempts
    again = ""
    if inside is not None and inside.is_significant and inside.ratio_per_week < 0:
        again = "; it falls within attempts, too, so a restart may bring it back"
    return (
        f"MFU changes by {speed.ratio_per_week:+.1%} a week ({bounds}) over "
        f"{speed.span_s / 86_400:.1f} days, which has cost {speed.lost_ratio:.1%} so far{again}"
    )
