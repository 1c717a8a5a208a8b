"""A map of ranks and steps: how long each rank took, and how much of that was work of its own.

Pure. Ranks are summed up one at a time, as what they have noted is large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
        # A step is over before it is saved.
        is_behind = span.name == Measure.CHECKPOINT
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Ranks that are next to each other, and of each step the longest that one of them took."""

    first: int
    last: int
    node: str
    pp: int | None
    seconds: list[float | None]


@dataclass(slots=True)
class HeatMap:
    """The newest steps of all ranks, in rows of as many ranks as it takes to have so many rows."""

    measure: Measure
    num_ranks: int
    most_rows: int
    most_steps: int
    _times: dict[int, tuple[TracedRank, dict[int, float]]] = field(init=False, default_factory=dict)

    def add(self, rank: TracedRank) -> None:
        """One more rank, of which no more is kept than is shown."""
        self.put(rank, measured(rank, self.measure, self.most_steps))

    def put(self, rank: TracedRank, seconds: dict[int, float]) -> None:
        """One more rank, with what its steps took by the measure."""
        bare = TracedRank(rank=rank.rank, node=rank.node, at=rank.at, operations=(), steps=())
        self._times[rank.rank] = (bare, seconds)

    def steps(self) -> list[int]:
        """Those that are shown, oldest first."""
        known = {step for _, times in self._times.values() for step in times}
        return sorted(known)[-self.most_steps :]

    def rows(self) -> list[Row]:
        """From rank 0 on; ranks of which nothing is known have no row."""
        steps = self.steps()
        ranks_per_row = -(-self.num_ranks // self.most_rows)
        rows: dict[int, list[int]] = {}
        for rank in sorted(self._times):
            rows.setdefault(rank // ranks_per_row, []).append(rank)
        return [self._row(ranks, steps) for ranks in rows.values()]

    def _row(self, ranks: list[int], steps: Iterable[int]) -> Row:
        first, _ = self._times[ranks[0]]
        known = [self._times[rank][1] for rank in ranks]
        return Row(
            first=ranks[0],
            last=ranks[-1],
            node=first.node,
            pp=None if first.at is None else first.at.pp,
            seconds=[
                max((times[step] for times in known if step in times), default=None)
                for step in steps
            ],
        )
