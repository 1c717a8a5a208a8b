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
from outlast.v1 import agents_pb2

# A window of what ranks report: so long, and so many samples of each.
WINDOW_S = 10.0
WINDOW_SAMPLES = 5
MOST_SAMPLES = 64
# How soon to look again where some rank has not reported enough.
LOOK_S = 1.0
# A few milliseconds of the loop.
RANKS_AT_ONCE = 500
# A step that waits for data for longer than it does anything else.
DATA_SHARE = 0.5
LEAST_DATA_S = 0.02

_Samples = deque[agents_pb2.RankUse]


@dataclass(slots=True, kw_only=True)
class Found:
    """What has begun or ended with the ranks of a window that were just looked at."""

    slow: tuple[Slow, ...] = ()
    slow_no_more: tuple[int, ...] = ()
    # With the measured value, the limit and where it comes from.
    starved: list[tuple[int, str]] = field(default_factory=list)
    starved_no_more: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Window:
    num_ranks: int
    left: Iterator[tuple[int, _Samples]]
    works_s: dict[int, float] = field(default_factory=dict)


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
        self._samples.setdefault(rank, deque(maxlen=MOST_SAMPLES)).append(use)

    def judge(self, world_size: int, now_s: float) -> Found | None:
        """Go on with the window that is judged, or begin with the next, once there is enough of
        every rank."""
        if self._window is None and not self._is_due(world_size, now_s):
            return None
        if self._window is None:
            self._window = _Window(num_ranks=len(self._samples), left=iter(self._samples.items()))
            self._samples, self._judge_at_s = {}, now_s + WINDOW_S
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

    def _go_on(self, window: _Window) -> Found:
        found = Found()
        for rank, uses in islice(window.left, RANKS_AT_ONCE):
            window.works_s[rank] = median(_own_work_s(use) for use in uses)
            self._look_at_data(rank, uses, found)
        if len(window.works_s) == window.num_ranks:
            self._window = None
            found.slow, found.slow_no_more = self._stragglers.take(window.works_s)
        return found

    def _look_at_data(self, rank: int, uses: _Samples, found: Found) -> None:
        data_s = median(use.split.data_s for use in uses)
        step_s = median(_step_s(use) for use in uses)
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


def _own_work_s(use: agents_pb2.RankUse) -> float:
    """A step without any waiting for others."""
    split = use.split
    return split.forward_s + split.backward_s + split.optimizer_s + split.data_s


def _step_s(use: agents_pb2.RankUse) -> float:
    split = use.split
    exposed_s = split.tp_exposed_s + split.pp_exposed_s + split.dp_exposed_s
    return _own_work_s(use) + exposed_s + split.other_exposed_s
