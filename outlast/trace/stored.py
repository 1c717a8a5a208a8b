"""What ranks have noted, kept on disk: a large job's would not fit into memory at once."""

from __future__ import annotations

import zlib
from bisect import insort
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import Self, overload

from outlast.layout import Layout
from outlast.trace.clocks import aligned
from outlast.trace.ranks import TracedRank, cut, latest_ns, traced_rank
from outlast.v1.ranks_pb2 import ReadTimesResponse

# Fast: it is written once and read a few times.
_LEVEL = 1


class StoredRanks(Sequence[TracedRank]):
    """Ranks in their order, each read when it is asked for; to be closed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sizes: set[int] = set()
        self._file = TemporaryFile(prefix="outlast-trace-")  # noqa: SIM115  # closed by __exit__
        # Where each rank lies, and how many bytes it has.
        self._places: dict[int, tuple[int, int]] = {}
        self._ranks: list[int] = []
        self._latest_ns = 0
        self._ahead: Mapping[str, int] = {}
        self._steps: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, found: ReadTimesResponse) -> None:
        """Keep a rank as the controller sends it; one that is there already is replaced.

        Raises:
            OSError: there is no room for it.
        """
        packed = zlib.compress(found.SerializeToString(), _LEVEL)
        place = self._file.seek(0, 2)
        self._file.write(packed)
        if found.rank not in self._places:
            insort(self._ranks, found.rank)
        self._places[found.rank] = (place, len(packed))
        self._latest_ns = max(self._latest_ns, latest_ns(found))
        self._sizes.add(found.times.world_size)

    @property
    def layout(self) -> Layout:
        """With as many replicas as the ranks say that there were, where they all say the same."""
        return self._layout.of_world(*self._sizes) if len(self._sizes) == 1 else self._layout

    def align(self, ahead: Mapping[str, int]) -> None:
        """From now on all have the clock of the first rank's node: see `clocks.ahead_ns`."""
        self._ahead = ahead

    def cut(self, first: int, last: int) -> None:
        """From now on they have only what lies in these steps."""
        self._steps = (first, last)

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> TracedRank: ...
    @overload
    def __getitem__(self, index: slice) -> list[TracedRank]: ...
    def __getitem__(self, index: int | slice) -> TracedRank | list[TracedRank]:
        if isinstance(index, slice):
            return [self._read(rank) for rank in self._ranks[index]]
        return self._read(self._ranks[index])

    def _read(self, rank: int) -> TracedRank:
        place, size = self._places[rank]
        self._file.seek(place)
        found = ReadTimesResponse.FromString(zlib.decompress(self._file.read(size)))
        ranks = [traced_rank(found, self.layout, self._latest_ns)]
        if self._ahead:
            ranks = aligned(ranks, self._ahead)
        return (cut(ranks, *self._steps) if self._steps else ranks)[0]
