"""Ranks that are slower at their own work than their equals.

Ranks of one pipeline stage do the same work, so their times without any waiting can be
compared; ranks of other stages cannot. With few equals there is no spread to speak of,
and only a large difference counts.

Source: NVRx compares with the best rank (< 0.75), DLRover takes 2 x the median; MegaScale
(NSDI '24, 5.1) found machines that were 10% slower, which both miss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diagnostics.core.windows import Lasting, z_of

RATIO = 1.10
# With 10,000 ranks a z of 3.5 would accuse two healthy ones in every window, 6 none in a year.
LEAST_Z = 6.0
# Below so many equals the spread says nothing.
FEW_PEERS = 4
RATIO_OF_FEW = 1.5
# A scheduler's time slice, several times over: less is not worth anyone's attention.
LEAST_EXCESS_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank's own work in one step, held against that of its equals."""

    rank: int
    work_s: float
    peers_s: float
    z: float
    limit: float

    @property
    def message(self) -> str:
        """The measured value, the limit and where it comes from."""
        return (
            f"rank {self.rank} works {self.work_s:.4g} s in a step, {self.ratio:.2f} times the "
            f"{self.peers_s:.4g} s of its equals (limit {self.limit:g}, from the ranks of its "
            "pipeline stage, in 3 of 5 windows)"
        )

    @property
    def ratio(self) -> float:
        return self.work_s / self.peers_s if self.peers_s else 0.0


def judge(works_s: Mapping[int, float], equals: Sequence[Sequence[int]]) -> tuple[Slow, ...]:
    """The ranks that stand out in one window; `equals` are groups that do the same work.

    Each is held against all others of its group, and yet values are sorted once for all of them:
    a group may have a hundred thousand ranks.
    """
    return tuple(
        slow
        for group in equals
        for slow in _judge_group([rank for rank in group if rank in works_s], works_s)
    )


def _judge_group(ranks: Sequence[int], works_s: Mapping[int, float]) -> Iterator[Slow]:
    if len(ranks) < 2:
        return
    is_few = len(ranks) - 1 < FEW_PEERS
    limit = RATIO_OF_FEW if is_few else RATIO
    ordered = sorted(works_s[rank] for rank in ranks)
    # The least that the median of a rank's others can be: nobody below this stands out.
    most_s = limit * _median_without(ordered, ordered[-1])
    # By the median of its others, which is one and the same for all that are above it.
    deviations: dict[float, list[float]] = {}
    for rank in ranks:
        own_s = works_s[rank]
        if own_s <= most_s:
            continue
        peers_s = _median_without(ordered, own_s)
        if own_s <= limit * peers_s or own_s - peers_s <= LEAST_EXCESS_S:
            continue
        if peers_s not in deviations:
            deviations[peers_s] = sorted(abs(value - peers_s) for value in ordered)
        spread = _median_without(deviations[peers_s], abs(own_s - peers_s))
        z = z_of(own_s, peers_s, spread)
        if is_few or z > LEAST_Z:
            yield Slow(rank=rank, work_s=own_s, peers_s=peers_s, z=z, limit=limit)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but one of them, which is equal to `value`."""
    gap = bisect_left(ordered, value)
    half, is_odd = divmod(len(ordered) - 1, 2)
    upper = ordered[half + (half >= gap)]
    if is_odd:
        return upper
    return (ordered[half - 1 + (half - 1 >= gap)] + upper) / 2


class StragglerTable:
    """Windows of one attempt."""

    def __init__(self, equals: Sequence[Sequence[int]]) -> None:
        self._equals = equals
        self._lasting: dict[int, Lasting] = {}

    def take(self, works_s: Mapping[int, float]) -> tuple[tuple[Slow, ...], tuple[int, ...]]:
        """One more window: who is a straggler from now on, and who is none any more."""
        slow = {found.rank: found for found in judge(works_s, self._equals)}
        begun: list[Slow] = []
        ended: list[int] = []
        for rank in works_s:
            if rank not in slow and rank not in self._lasting:
                continue
            change = self._lasting.setdefault(rank, Lasting()).take(bad=rank in slow)
            if change is True:
                begun.append(slow[rank])
            elif change is False:
                ended.append(rank)
                del self._lasting[rank]
        return tuple(begun), tuple(ended)
