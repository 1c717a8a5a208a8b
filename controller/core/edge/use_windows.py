"""Where the time of ranks' steps goes: gathered in windows, and each rank held against its equals.

A window of a large job is judged some ranks at a time, between heartbeats of others: a hundred
thousand at once would hold the controller's loop for a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from diagnostics.core.stragglers import Slow, StragglerTable
from diagnostics.core.windows import Lasting
from outlast.v1 import agents_pb2, common_pb2

# A window of what ranks report: so long, and so many samples of each.
WINDOW_S = 10.0
WINDOW_SAMPLES = 5
MOST_SAMPLES = 64
# How soon to look again where some rank has not reported enough.
LOOK_S = 1.0
# Two milliseconds of the loop, and how soon others follow: other heartbeats come in between.
RANKS_AT_ONCE = 500
PAUSE_S = 0.02
# A step that waits for data for longer than it does anything else.
DATA_SHARE = 0.5
LEAST_DATA_S = 0.02


@dataclass(frozen=True, slots=True)
class _Sample:
    """Of a mean step: what a rank did itself, what of it was waiting for data, and all of it.

    Numbers, since a part of a message keeps the whole heartbeat in memory.
    """

    work_s: float
    data_s: float
    step_s: float


_Samples = deque[_Sample]


@dataclass(slots=True, kw_only=True)
class Found:
    """What has begun or ended with ranks in a window."""

    slow: tuple[Slow, ...] = ()
    slow_no_more: tuple[int, ...] = ()
    # With the measured value, the limit and where it comes from.
    starved: list[tuple[int, str]] = field(default_factory=list)
    starved_no_more: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Window:
    num_ranks: int
    left: Iterator[tuple[int, _Samples]]
    go_on_s: float
    works_s: dict[int, float] = field(default_factory=dict)
    found: Found = field(default_factory=Found)


class UseWindows:
    """Of one attempt."""

    def __init__(self, equals: Sequence[Sequence[int]]) -> None:
        """`equals` are groups of ranks that do the same work."""
        self._stragglers = StragglerTable(equals)
        self._data: dict[int, Lasting] = {}
        # The newest of each rank: some may have nothing to report for long.
        self._samples: dict[int, _Samples] = {}
        # When to judge them next.
        self._judge_at_s: float | None = None
        self._window: _Window | None = None

    def note(self, rank: int, use: agents_pb2.RankUse) -> None:
        """What a rank says of its last steps."""
        self._samples.setdefault(rank, deque(maxlen=MOST_SAMPLES)).append(_sample(use.split))

    def judge(self, world_size: int, now_s: float) -> Found | None:
        """Go on with the window that is judged, or begin with the next, once there is enough of
        every rank. What came of it, once all of them have been looked at."""
        if self._window is None and not self._is_due(world_size, now_s):
            return None
        if self._window is None:
            left = iter(self._samples.items())
            self._window = _Window(num_ranks=len(self._samples), left=left, go_on_s=now_s)
            self._samples, self._judge_at_s = {}, now_s + WINDOW_S
        if now_s < self._window.go_on_s:
            return None
        self._window.go_on_s = now_s + PAUSE_S
        return self._go_on(self._window)

    def _is_due(self, world_size: int, now_s: float) -> bool:
        if self._judge_at_s is None:
            self._judge_at_s = now_s + WINDOW_S
        if now_s < self._judge_at_s:
            return False
        if len(self._samples) < world_size or any(
            len(samples) < WINDOW_SAMPLES for samples in self._samples.values()
        ):
            # Not at every heartbeat of thousands of nodes.
            self._judge_at_s = now_s + LOOK_S
            return False
        return True

    def _go_on(self, window: _Window) -> Found | None:
        found = window.found
        for rank, samples in islice(window.left, RANKS_AT_ONCE):
            window.works_s[rank] = median(sample.work_s for sample in samples)
            self._look_at_data(rank, samples, found)
        if len(window.works_s) < window.num_ranks:
            return None
        self._window = None
        found.slow, found.slow_no_more = self._stragglers.take(window.works_s)
        return found

    def _look_at_data(self, rank: int, samples: _Samples, found: Found) -> None:
        data_s = median(sample.data_s for sample in samples)
        step_s = median(sample.step_s for sample in samples)
        is_bad = data_s > LEAST_DATA_S and data_s > DATA_SHARE * step_s
        change = self._data.setdefault(rank, Lasting()).take(bad=is_bad)
        if change is True:
            message = (
                f"rank {rank} waits {data_s:.3g} s for data in a step of {step_s:.3g} s "
                f"(limit {DATA_SHARE:.0%}, ours, in 3 of 5 windows)"
            )
            found.starved.append((rank, message))
        elif change is False:
            found.starved_no_more.append(rank)


def _sample(split: common_pb2.StepSplit) -> _Sample:
    data_s = split.data_s
    work_s = split.forward_s + split.backward_s + split.optimizer_s + data_s
    exposed_s = split.tp_exposed_s + split.pp_exposed_s + split.dp_exposed_s
    step_s = work_s + exposed_s + split.other_exposed_s
    return _Sample(work_s=work_s, data_s=data_s, step_s=step_s)
