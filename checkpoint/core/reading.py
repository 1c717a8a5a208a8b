"""Who reads what of a checkpoint, when every rank wants its own rectangles of it.

The layout that saved a checkpoint and the one that loads it need not be the same.
A tensor's saved rectangles tile it (`tiles.py`), and what a rank wants of each
tile is strided ranges of bytes (`strided.py`). Files are read in blocks, because a block is
what has a checksum, and each block that anybody needs is read by exactly one of
those who need it and passed on to the others.

A rank plans for itself, from the manifest and what all ranks want, and only for
blocks that it needs; that all plans fit together follows from the rules:

- blocks are dealt out among those who need the same ones (a *circle*), in turns,
  in the order of files and bytes; every member of a circle sees all its blocks;
- units are handled in one order, by round and place: a round gives every member
  of a circle one unit to read. So members read side by side, and nobody waits
  for a unit while holding up an earlier one.

Blocks that nobody needs are read all the same, by one rank each, so that damage
anywhere in a checkpoint is noticed by whoever loads it.

What does not belong here: reading, sending, and which step is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from checkpoint.core.manifest import Manifest
from checkpoint.core.shards import ShardTensor
from checkpoint.core.strided import Box, StridedRange
from checkpoint.core.tiles import Shelf, Tile, Tiles, Wanted, check_same_model

# Adjacent blocks that one rank reads go into one request of at most this size: an object
# store's latency (50 ms) is then small beside the transfer, and pieces stay small enough
# to be passed on while the next is read.
UNIT_BYTES = 16 << 20

# A message may carry so much that its receiver has no use for, when that spares packing it:
# a copy of what is useful costs more than sending an eighth in vain.
_MOST_IN_VAIN = 1 / 8

_Block = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What the reader of a unit sends to one other rank.

    Either all bytes from `start` on, counted from the unit's beginning, or, when
    `packing` says how, only those that are useful, one range after another.
    `pieces` bring it home: (index of the wanted tensor, range of the message).
    """

    nbytes: int
    start: int
    packing: tuple[StridedRange, ...]
    pieces: tuple[tuple[int, StridedRange], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Bytes of a part that go to a tensor: to each (rank, index of its wanted tensor)."""

    targets: tuple[tuple[int, int], ...]
    span: StridedRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Adjacent blocks of one part: read and verified by one rank, passed on to the others.

    `part` is the part's index in the manifest, `start` and `end` are bytes of its
    file. `number` is the same on every rank that needs the unit, and belongs to no
    other unit that any two of them share.
    """

    part: int
    first_block: int
    num_blocks: int
    start: int
    end: int
    reader: int
    round: int
    number: int
    circle: tuple[int, ...]
    copies: tuple[Copy, ...] = field(repr=False)

    @property
    def others(self) -> tuple[int, ...]:
        """Who gets it from the reader."""
        return tuple(rank for rank in self.circle if rank != self.reader)

    def pieces(self, rank: int) -> tuple[tuple[int, StridedRange], ...]:
        """What `rank` needs: its tensor's index, and a range counted from the unit's start."""
        return tuple(
            (index, replace(span, source=span.source - self.start))
            for copy in self.copies
            for holder, index in copy.targets
            if holder == rank
            for span in copy.span.cut(self.start, self.end)
        )

    def message(self, rank: int) -> Message:
        """What the reader sends to `rank`."""
        pieces = self.pieces(rank)
        start = min(span.source for _, span in pieces)
        length = max(span.source_end for _, span in pieces) - start
        useful = sum(span.nbytes for _, span in pieces)
        if useful >= (1 - _MOST_IN_VAIN) * length:
            arriving = (replace(span, source=span.source - start) for _, span in pieces)
            packing: tuple[StridedRange, ...] = ()
        else:
            places = list(accumulate((span.nbytes for _, span in pieces), initial=0))[:-1]
            start, length = 0, useful
            packing = tuple(
                replace(span, target=place, target_stride=span.run)
                for place, (_, span) in zip(places, pieces, strict=True)
            )
            arriving = (
                replace(span, source=place, source_stride=span.run)
                for place, (_, span) in zip(places, pieces, strict=True)
            )
        indices = (index for index, _ in pieces)
        return Message(
            nbytes=length,
            start=start,
            packing=packing,
            pieces=tuple(zip(indices, arriving, strict=True)),
        )


def plan_reading(
    tiles: Tiles,
    wanted: Sequence[Sequence[Wanted]],
    rank: int,
    *,
    unit_bytes: int = UNIT_BYTES,
    is_whole: bool = True,
) -> tuple[Unit, ...]:
    """The units that `rank` needs, in the order in which all ranks handle them.

    `wanted[r]` is what rank r wants filled; together that is all that was saved, unless
    `is_whole` says otherwise: then nothing else is read. A unit has at most `unit_bytes`, or is a
    single block.

    Raises:
        LayoutMismatchError: the checkpoint is of another model.
    """
    check_same_model(tiles, wanted, is_whole=is_whole)
    requests = _Requests(wanted)
    blocks = _own_blocks(tiles, wanted[rank])
    copies: dict[_Block, list[Copy]] = {block: [] for block in blocks}
    for part in sorted({part for part, _ in blocks}):
        block_bytes = tiles.manifest.parts[part].block_bytes
        for tile in tiles.by_part[part]:
            if not _touches(tile.tensor, part, block_bytes, blocks):
                continue
            for copy in requests.copies(tile):
                for index in _blocks_of(copy.span, block_bytes):
                    if (part, index) in blocks:
                        copies[part, index].append(copy)
    firsts = _first_numbers(tiles.manifest)
    for part, index in tiles.idle_blocks() if is_whole else ():
        if (firsts[part] + index) % len(wanted) == rank:
            copies[part, index] = []
    return _deal(tiles.manifest, copies, rank, unit_bytes)


class _Requests:
    """What all ranks want, by name; replicas that want the same rectangle are one request."""

    def __init__(self, wanted: Sequence[Sequence[Wanted]]) -> None:
        by_name: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for rank, tensors in enumerate(wanted):
            for index, tensor in enumerate(tensors):
                by_name[tensor.name][tensor.box].append((rank, index))
        self._by_name = {
            name: Shelf([(box, tuple(targets)) for box, targets in boxes.items()])
            for name, boxes in by_name.items()
        }

    def copies(self, tile: Tile) -> Iterator[Copy]:
        """What of a tile goes where."""
        wanted = self._by_name.get(tile.tensor.name)
        for box, targets in wanted.near(tile.box) if wanted is not None else ():
            for span in tile.strided_ranges(box):
                yield Copy(targets=targets, span=span)


def _own_blocks(tiles: Tiles, wanted: Sequence[Wanted]) -> set[_Block]:
    """(part, block) of everything that a rank needs."""
    return {
        (part, index)
        for tensor in wanted
        for part, span in tiles.strided_ranges(tensor)
        for index in _blocks_of(span, tiles.manifest.parts[part].block_bytes)
    }


def _touches(tensor: ShardTensor, part: int, block_bytes: int, blocks: set[_Block]) -> bool:
    first = tensor.byte_offset // block_bytes
    last = (tensor.byte_offset + max(0, tensor.nbytes - 1)) // block_bytes
    return any((part, index) in blocks for index in range(first, last + 1))


def _blocks_of(span: StridedRange, block_bytes: int) -> Iterable[int]:
    """Numbers of the blocks that hold bytes of a strided range."""
    if span.source_stride - span.run < block_bytes:
        # No block fits between two runs.
        return range(span.source // block_bytes, (span.source_end - 1) // block_bytes + 1)
    starts = (span.source + row * span.source_stride for row in range(span.count))
    return {
        index
        for start in starts
        for index in range(start // block_bytes, (start + span.run - 1) // block_bytes + 1)
    }


def _first_numbers(manifest: Manifest) -> list[int]:
    """The number of each part's first block, when blocks are counted through all parts."""
    return list(accumulate((len(part.blocks) for part in manifest.parts), initial=0))


def _deal(
    manifest: Manifest, copies: Mapping[_Block, Sequence[Copy]], rank: int, unit_bytes: int
) -> tuple[Unit, ...]:
    """The blocks that `rank` has to do with as units, each with its reader, in order."""
    circles: dict[tuple[int, ...], list[_Block]] = defaultdict(list)
    for block in sorted(copies):
        ranks = {target for copy in copies[block] for target, _ in copy.targets}
        circles[tuple(sorted(ranks)) or (rank,)].append(block)
    firsts = _first_numbers(manifest)
    units = []
    for circle, blocks in circles.items():
        # Where a circle begins differs, so that blocks on the edges of many do not all
        # fall to their first members.
        shift = sum(blocks[0])
        for position, run in enumerate(_runs(manifest, blocks, len(circle), unit_bytes)):
            part, first = run[0]
            record = manifest.parts[part]
            touching = {id(copy): copy for block in run for copy in copies[block]}
            units.append(
                Unit(
                    part=part,
                    first_block=first,
                    num_blocks=len(run),
                    start=record.block_range(first)[0],
                    end=record.block_range(run[-1][1])[1],
                    reader=circle[(position + shift) % len(circle)],
                    round=position // len(circle),
                    number=firsts[part] + first,
                    circle=circle,
                    copies=tuple(touching.values()),
                )
            )
    return tuple(sorted(units, key=lambda unit: (unit.round, unit.part, unit.first_block)))


def _runs(
    manifest: Manifest, blocks: Sequence[_Block], num_readers: int, unit_bytes: int
) -> Iterator[list[_Block]]:
    """Adjacent blocks of one part, as many together as leave every reader its share."""
    run: list[_Block] = []
    for part, index in blocks:
        most = min(unit_bytes // manifest.parts[part].block_bytes, len(blocks) // num_readers)
        if run and (len(run) >= most or (part, index) != (run[-1][0], run[-1][1] + 1)):
            yield run
            run = []
        run.append((part, index))
    if run:
        yield run
