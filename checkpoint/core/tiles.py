"""The rectangles that a checkpoint holds, as tiles of the tensors that they make up.

Layouts differ in how they cut tensors and in what they hold several times. A tile
is a rectangle in one part that holds it; together the tiles of a tensor are all of
it, once.

What does not belong here: who reads them (`reading.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from checkpoint.core.errors import CorruptCheckpointError, LayoutMismatchError
from checkpoint.core.manifest import Manifest
from checkpoint.core.shards import ShardTensor
from checkpoint.core.strided import Box, StridedRange, strided_ranges

_Item = TypeVar("_Item")


class Wanted(NamedTuple):
    """A rectangle that a rank wants filled."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(offsets=self.offsets, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A saved rectangle; `part` is the index of its part in the manifest."""

    part: int
    tensor: ShardTensor

    @property
    def box(self) -> Box:
        return Box(offsets=self.tensor.offsets, shape=self.tensor.shape)

    def strided_ranges(self, target: Box) -> Iterator[StridedRange]:
        """What `target` needs of it; sources count in the part's file."""
        items = math.prod(self.tensor.shape)
        if items:
            yield from strided_ranges(
                self.box,
                target,
                item_bytes=self.tensor.nbytes // items,
                source_at=self.tensor.byte_offset,
            )


class Tiles:
    """The saved rectangles that make up each tensor, each in one of the parts that hold it.

    Raises:
        CorruptCheckpointError: rectangles of a tensor leave a gap, or overlap.
    """

    def __init__(self, manifest: Manifest, *, without: str | None = None) -> None:
        """`without` begins the names of tensors that nobody wants."""
        self.manifest = manifest
        holders: dict[tuple[object, ...], list[tuple[int, ShardTensor]]] = defaultdict(list)
        for index, part in enumerate(manifest.parts):
            for tensor in part.tensors:
                if without is not None and tensor.name.startswith(without):
                    continue
                holders[tensor.rectangle].append((index, tensor))
        self.by_part: dict[int, list[Tile]] = defaultdict(list)
        by_name: dict[str, list[Tile]] = defaultdict(list)
        for part_index, tensor in _one_holder_each(holders.values()):
            tile = Tile(part=part_index, tensor=tensor)
            by_name[tensor.name].append(tile)
            self.by_part[part_index].append(tile)
        for tiles in by_name.values():
            self._check_whole(tiles)
        self.saved = {name: tiles[0].tensor for name, tiles in by_name.items()}
        self._shelves = {
            name: Shelf([(tile.box, tile) for tile in tiles]) for name, tiles in by_name.items()
        }

    def idle_blocks(self) -> Iterator[tuple[int, int]]:
        """(part, block) of blocks without a byte of a tile: frames, and what others hold too."""
        for index, part in enumerate(self.manifest.parts):
            following = 0
            for tile in sorted(self.by_part[index], key=lambda tile: tile.tensor.byte_offset):
                tensor = tile.tensor
                if not tensor.nbytes:
                    continue
                first = tensor.byte_offset // part.block_bytes
                yield from ((index, block) for block in range(following, first))
                following = (tensor.byte_offset + tensor.nbytes - 1) // part.block_bytes + 1
            yield from ((index, block) for block in range(following, len(part.blocks)))

    def strided_ranges(self, wanted: Wanted) -> Iterator[tuple[int, StridedRange]]:
        """(part, span) of all that makes up a wanted rectangle."""
        for _, tile in self._shelves[wanted.name].near(wanted.box):
            for span in tile.strided_ranges(wanted.box):
                yield tile.part, span

    def _check_whole(self, tiles: Sequence[Tile]) -> None:
        first = tiles[0].tensor
        for tile in tiles:
            if (tile.tensor.dtype, tile.tensor.global_shape) != (first.dtype, first.global_shape):
                raise CorruptCheckpointError(
                    self.manifest.step, f"parts disagree about type or shape of {first.name}"
                )
        held = sum(math.prod(tile.tensor.shape) for tile in tiles)
        size = math.prod(first.global_shape)
        if held != size:
            raise CorruptCheckpointError(
                self.manifest.step, f"parts hold {held} of {size} elements of {first.name}"
            )


def check_same_model(tiles: Tiles, wanted: Sequence[Sequence[Wanted]], *, is_whole: bool) -> None:
    """Raise LayoutMismatchError unless the ranks together want the tensors that were saved."""
    step = tiles.manifest.step
    needed = {tensor[:3] for tensors in wanted for tensor in tensors}
    for name, dtype, global_shape in sorted(needed):
        saved = tiles.saved.get(name)
        if saved is None:
            raise LayoutMismatchError(
                f"checkpoint step {step} has no tensor {name}: it is of another model; "
                "load it with the model section that saved it"
            )
        if (saved.dtype, saved.global_shape) != (dtype, global_shape):
            raise LayoutMismatchError(
                f"checkpoint step {step} holds {name} as {saved.dtype} {saved.global_shape}, and "
                f"{dtype} {global_shape} is wanted: it is of another model or precision; load it "
                "with the settings that saved it"
            )
    names = {name for name, _, _ in needed}
    surplus = sorted(name for name in tiles.saved if name not in names)
    if surplus and is_whole:
        raise LayoutMismatchError(
            f"checkpoint step {step} holds {len(surplus)} tensors that this model has not, first "
            f"{surplus[0]}: it is of another model; load it with the model section that saved it"
        )


class Shelf(Generic[_Item]):
    """Rectangles of one tensor and what belongs to each, by their first dimension."""

    def __init__(self, items: Iterable[tuple[Box, _Item]]) -> None:
        self._items = sorted(items, key=lambda item: item[0].offsets)
        self._starts = [box.offsets[:1] for box, _ in self._items]
        self._longest = max((box.shape[0] for box, _ in self._items if box.shape), default=0)

    def near(self, box: Box) -> Sequence[tuple[Box, _Item]]:
        """Those that may share something with `box`: none that does is left out."""
        if not box.shape:
            return self._items
        first = bisect_left(self._starts, (box.offsets[0] - self._longest + 1,))
        return self._items[first : bisect_left(self._starts, (box.offsets[0] + box.shape[0],))]


def _one_holder_each(
    holders: Iterable[Sequence[tuple[int, ShardTensor]]],
) -> Iterator[tuple[int, ShardTensor]]:
    """Of parts that hold the same rectangle the least loaded one, largest rectangles first."""
    load: dict[int, int] = defaultdict(int)
    ordered = sorted(
        holders,
        key=lambda held: (len(held) > 1, -held[0][1].nbytes, held[0][1].name, held[0][1].offsets),
    )
    for held in ordered:
        part, tensor = min(held, key=lambda one: (load[one[0]], one[0]))
        load[part] += tensor.nbytes
        yield part, tensor
