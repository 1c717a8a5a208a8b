"""How long each step of a rank took, and how much of that was work of its own.

Pure. Ranks are summed up one at a time, as what they have noted is large: agents do it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from outlast.trace.ranks import TracedRank, own_work


class Measure(StrEnum):
    """What of a step is shown."""

    STEP = "step"
    WORK = "work"
    """In no operation that may wait for other ranks: what a slow rank has more of."""
    WAITING = "waiting"
    """In such operations, their own transfers among it: what its peers have more of."""
    FORWARD = "forward"
    """In forward passes, without waiting for others; the rest likewise."""
    BACKWARD = "backward"
    DATA = "data"
    """Until the step's batch was there."""
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    """Behind the step, until it was saved in host memory or its copy was under way."""
    GARBAGE_COLLECTION = "garbage_collection"
    """Behind the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Of one step of one rank, in seconds; None where its operations are not known any more."""

    step: int
    total_s: float
    work_s: float | None
    spent_s: Mapping[str, float] | None = None
    """By the names of those phases and passes that the rank notes, waiting for others left out."""

    def of(self, measure: Measure) -> float | None:
        """That part of it."""
        match measure:
            case Measure.STEP:
                return self.total_s
            case Measure.WORK:
                return self.work_s
            case Measure.WAITING:
                return None if self.work_s is None else max(0.0, self.total_s - self.work_s)
            case _:
                return None if self.spent_s is None else self.spent_s.get(measure)


def step_times(rank: TracedRank) -> list[StepTime]:
    """What a rank's steps took, in their order."""
    known_ns = min((each.start_ns for each in rank.operations), default=None)
    starts = [each.start_ns for each in rank.steps]
    work_ns = [0] * len(starts)
    for span in own_work(rank, 1):
        work_ns[bisect_right(starts, span.start_ns) - 1] += span.end_ns - span.start_ns
    return [
        StepTime(
            step=each.step,
            total_s=(each.end_ns - each.start_ns) / 1e9,
            # Some of its operations have been written over.
            work_s=None if known_ns is None or each.start_ns < known_ns else work / 1e9,
            spent_s=spent_s,
        )
        for each, work, spent_s in zip(rank.steps, work_ns, _spent_s(rank), strict=True)
    ]


def _spent_s(rank: TracedRank) -> list[dict[str, float] | None]:
    """Of each step what its phases and passes took; None where some have been written over."""
    known_ns = min((each.start_ns for each in rank.spans), default=None)
    starts = [each.start_ns for each in rank.steps]
    ends = [each.end_ns for each in rank.steps]
    names = {each.name for each in rank.spans}
    found: list[dict[str, float] | None] = [
        None if known_ns is None or start_ns < known_ns else dict.fromkeys(names, 0.0)
        for start_ns in starts
    ]
    for span in rank.spans:
        # A step is over before it is saved, and before garbage is collected.
        is_behind = span.name in (Measure.CHECKPOINT, Measure.GARBAGE_COLLECTION)
        index = bisect_right(ends if is_behind else starts, span.start_ns) - 1
        spent = found[index] if index >= 0 and span.is_over else None
        if spent is None:
            continue
        # The last phase of a step goes on until the next step begins.
        end_ns = span.end_ns if is_behind else min(span.end_ns, ends[index])
        spent[span.name] += max(0, end_ns - span.start_ns - span.waited_ns) / 1e9
    return found


def measured(rank: TracedRank, measure: Measure, most_steps: int) -> dict[int, float]:
    """Seconds of the newest steps, where they are known."""
    found = {}
    for each in step_times(rank)[-most_steps:]:
        if (seconds := each.of(measure)) is not None:
            found[each.step] = seconds
    return found
