"""A map of ranks and steps: in rows, each cell against the ranks that have equal work.

Pure. Rows may have several ranks; a cell then is of the one that is furthest above its own peers,
so that ranks of different stages may share a row. What is above is measured by rank, before ranks
are put together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from outlast.layout import Layout
from outlast.trace.heat import Alike, Measure, Order, has_experts, kind_of

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Steps = npt.NDArray[np.int64]
Key = TypeVar("Key", int, tuple[tuple[int, str], ...])

# An outlier takes so much longer than its peers ...
OUTLIER = 1.15
# ... so many times as much as half of all ranks differ from them (four standard deviations, where
# what differs is noise) ...
_SPREADS = 6
# ... and so much that it is no matter of the clock or of the scheduler.
_LEAST_S = 0.001
# Where peers take no time at all, who does is so far above them.
_ABOVE_NOTHING = 2.0
_MOST_RATIO = 100.0
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Ranks that are next to each other.

    Of each step what the one took that is furthest above its peers, in seconds and as a ratio to
    their median; NaN where that is not known.
    """

    ranks: tuple[int, ...]
    node: str
    """Of the first."""
    pp: int | None
    slowest: int
    """Which one is furthest above its peers on the mean, and how far."""
    mean_ratio: float
    seconds: Floats
    ratios: Floats
    outliers: tuple[tuple[int, int], ...]
    """In which steps one is an outlier: the index of the first of a run, and how many."""


@dataclass(slots=True)
class HeatMap:
    """The newest steps of all ranks, in so many rows at most."""

    measure: Measure
    num_ranks: int
    layout: Layout
    most_rows: int
    most_steps: int
    order: Order = Order.RANK
    _nodes: dict[int, str] = field(init=False, default_factory=dict)
    _seconds: dict[int, Singles] = field(init=False, default_factory=dict)
    # Most ranks have done the same steps: those are kept once.
    _steps: dict[int, bytes] = field(init=False, default_factory=dict)
    _known: dict[bytes, Steps] = field(init=False, default_factory=dict)

    def put(self, rank: int, node: str, steps: Sequence[int], seconds: Sequence[float]) -> None:
        """One more rank, with what its steps took by the measure."""
        done = np.array(steps, np.int64)
        key = done.tobytes()
        self._known.setdefault(key, done)
        self._nodes[rank] = node
        self._steps[rank] = key
        self._seconds[rank] = np.array(seconds, np.float32)

    @property
    def alike(self) -> tuple[Alike, ...]:
        """What ranks have in common that are measured against each other."""
        found = [Alike.STAGE] if self.layout.pp > 1 else []
        return (*found, Alike.EXPERTS) if has_experts(self.layout) else (*found,)

    def steps(self) -> list[int]:
        """Those that are shown, oldest first."""
        return [int(step) for step in self._shown()]

    def rows(self) -> list[Row]:
        """In their order; ranks of which nothing is known have no row."""
        ranks = sorted(self._seconds)
        if not ranks:
            return []
        seconds = self._table(ranks)
        ratios, is_outlier = _against_peers(seconds, self._peers(ranks))
        known = ~np.isnan(ratios)
        sums = np.where(known, ratios, 0).sum(axis=1)
        means = sums / np.maximum(1, known.sum(axis=1))
        index = {rank: at for at, rank in enumerate(ranks)}
        blocks = [[each for each in block if each in index] for block in self._blocks()]
        rows = []
        for block in filter(None, blocks):
            members = np.array([index[rank] for rank in block])
            above = np.where(known[members], ratios[members], -1)
            furthest = members[above.argmax(axis=0)], np.arange(ratios.shape[1])
            slowest = members[means[members].argmax()]
            rows.append(
                Row(
                    ranks=tuple(block),
                    node=self._nodes[block[0]],
                    pp=self._pp(block[0]),
                    slowest=ranks[slowest],
                    mean_ratio=float(means[slowest]),
                    seconds=seconds[furthest].astype(np.float64),
                    ratios=ratios[furthest].astype(np.float64),
                    outliers=_runs(is_outlier[members].any(axis=0)),
                )
            )
        return rows

    def _shown(self) -> Steps:
        none = np.array([], np.int64)
        return np.unique(np.concatenate([none, *self._known.values()]))[-self.most_steps :]

    def _table(self, ranks: Sequence[int]) -> Singles:
        """A row for each rank, a column for each step; NaN where it is not known."""
        shown = self._shown()
        table = np.full((len(ranks), len(shown)), np.nan, np.float32)
        places = {}
        for key, steps in self._known.items():
            is_shown = np.isin(steps, shown)
            places[key] = is_shown, np.searchsorted(shown, steps[is_shown])
        for row, rank in zip(table, ranks, strict=True):
            is_shown, columns = places[self._steps[rank]]
            row[columns] = self._seconds[rank][is_shown]
        return table

    def _pp(self, rank: int) -> int | None:
        return self.layout.coordinate(rank).pp if rank < self.layout.world_size else None

    def _peers(self, ranks: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """The indices of those that are measured against each other."""
        groups: dict[tuple[int, int] | None, list[int]] = {}
        for index, rank in enumerate(ranks):
            groups.setdefault(kind_of(rank, self.layout), []).append(index)
        return [np.array(each) for each in groups.values()]

    def _blocks(self) -> list[list[int]]:
        """The ranks of each row."""
        return _blocks(self._units(), self.most_rows)

    def _units(self) -> list[list[int]]:
        """Ranks that belong together, in the order of the rows."""
        match self.order:
            case Order.RANK:
                return [[rank] for rank in range(self.num_ranks)]
            case Order.NODE:
                return _grouped({rank: _natural(node) for rank, node in self._nodes.items()})
            case Order.POSITION:
                replicas = {rank: _replica(rank, self.layout) for rank in range(self.num_ranks)}
                return _grouped(replicas)


def _replica(rank: int, layout: Layout) -> int:
    return layout.coordinate(rank).dp if rank < layout.world_size else layout.dp


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """So that node-10 comes behind node-9."""
    parts = _NUMBER.split(name)
    return tuple((int(each) if each.isdigit() else -1, each) for each in parts)


def _grouped(keys: Mapping[int, Key]) -> list[list[int]]:
    """Ranks with the same key, in the order of the keys, and of the ranks within."""
    units: dict[Key, list[int]] = {}
    for rank in sorted(keys):
        units.setdefault(keys[rank], []).append(rank)
    return [units[key] for key in sorted(units)]


def _blocks(units: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """So many blocks at most: parts of units, or several whole ones."""
    if sum(map(len, units)) <= most:
        return [[each] for unit in units for each in unit]
    if len(units) <= most:
        per_unit = most // len(units)
        blocks = []
        for unit in units:
            size = -(-len(unit) // per_unit)
            blocks += [[*unit[first : first + size]] for first in range(0, len(unit), size)]
        return blocks
    size = -(-len(units) // most)
    return [
        [each for unit in units[first : first + size] for each in unit]
        for first in range(0, len(units), size)
    ]


def _against_peers(
    seconds: Singles, groups: Sequence[npt.NDArray[np.int64]]
) -> tuple[Singles, npt.NDArray[np.bool_]]:
    """The ratios of a table to the medians of each group, and which cells are outliers."""
    ratios = np.full_like(seconds, np.nan)
    is_outlier = np.zeros(seconds.shape, bool)
    for members in groups:
        own = seconds[members]
        middle = _lower_median(own)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(middle > 0, own / middle, np.where(own > 0, _ABOVE_NOTHING, 1))
        found = np.minimum(found, _MOST_RATIO).astype(np.float32)
        found[np.isnan(own)] = np.nan
        ratios[members] = found
        # Nobody differs from himself.
        if len(members) > 1 and own.size:
            differs = np.abs(found - 1).reshape(-1, 1)
            least = max(OUTLIER, 1 + _SPREADS * float(_lower_median(differs)[0]))
            is_outlier[members] = (found >= least) & (own - middle >= _LEAST_S)
    return ratios, is_outlier


def _lower_median(values: Singles) -> Singles:
    """Of each column; the lower of two, as of two peers the slow one is to be told from the other.

    NaN for a column without a number.
    """
    # Rows of memory are sorted faster than columns; numbers come before NaN.
    columns = np.sort(np.ascontiguousarray(values.T), axis=1)
    counts = (~np.isnan(columns)).sum(axis=1)
    found: Singles = columns[np.arange(len(columns)), np.maximum(0, counts - 1) // 2]
    return found


def _runs(marked: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marked, [False]])))
    return tuple((int(first), int(last - first)) for first, last in edges.reshape(-1, 2))
