"""What is left of a damaged checkpoint: which rectangles are intact, and which are lost.

Damage is a range of bytes of a part's file. It costs the rows of a tensor that it touches, not
the tensor: rows lie one after another, so what is before and after is a smaller rectangle. Where
another part holds the same rectangle, its rows take the place of the lost ones. A tensor is whole
when all of its elements are there; of any other the intact pieces are kept apart, so that nobody
takes half of a tensor for all of it.

What does not belong here: reading files and finding the damage (`checkpoint/salvage.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpoint.core.shards import ShardTensor

# Half-open, in bytes or rows.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a tensor, and which bytes of the file of a part hold it.

    `part` is an index into the parts that were planned with.
    """

    part: int
    tensor: ShardTensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def indices(self) -> str:
        """The piece as an index into its tensor, as people write it: `[0:4, 16:32]`."""
        pairs = zip(self.offsets, self.shape, strict=True)
        return "[" + ", ".join(f"{first}:{first + length}" for first, length in pairs) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Elements of a tensor that no record places anywhere."""

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvagePlan:
    """`whole` makes up tensors all of which is there; `partial` is what is intact of others."""

    whole: tuple[Piece, ...]
    partial: tuple[Piece, ...]
    lost: tuple[Piece, ...]
    missing: tuple[Missing, ...]

    @property
    def is_complete(self) -> bool:
        """Whether nothing of what the records name is lost."""
        return not (self.lost or self.missing)


def plan_salvage(
    tensors: Sequence[Sequence[ShardTensor]], damage: Sequence[Sequence[Range]]
) -> SalvagePlan:
    """What can be kept of parts that hold these tensors and have this damage, in bytes."""
    holders: dict[tuple[object, ...], list[tuple[int, ShardTensor]]] = defaultdict(list)
    for part, held in enumerate(tensors):
        for tensor in held:
            holders[tensor.rectangle].append((part, tensor))
    kept: dict[str, list[Piece]] = defaultdict(list)
    lost: dict[str, list[Piece]] = defaultdict(list)
    for candidates in holders.values():
        name = candidates[0][1].name
        intact, gone = _kept_and_lost(candidates, damage)
        kept[name] += intact
        lost[name] += gone
    missing = {name: found for name in kept if (found := _missing(kept[name], lost[name]))}
    broken = {name for name in kept if lost[name] or name in missing}
    return SalvagePlan(
        whole=tuple(piece for name in kept if name not in broken for piece in kept[name]),
        partial=tuple(piece for name in kept if name in broken for piece in kept[name]),
        lost=tuple(piece for name in kept for piece in lost[name]),
        missing=tuple(missing.values()),
    )


def _kept_and_lost(
    candidates: Sequence[tuple[int, ShardTensor]], damage: Sequence[Sequence[Range]]
) -> tuple[list[Piece], list[Piece]]:
    """Pieces of one rectangle, each from the part that holds most of it intact."""
    bad = [_bad_rows(tensor, damage[part]) for part, tensor in candidates]
    order = sorted(range(len(candidates)), key=lambda index: _length(bad[index]))
    part, tensor = candidates[order[0]]
    needed: list[Range] = [(0, _num_rows(tensor))]
    kept = []
    for index in order:
        good = _without(needed, bad[index])
        kept += [_piece(*candidates[index], rows) for rows in good]
        needed = _without(needed, good)
    return kept, [_piece(part, tensor, rows) for rows in needed]


def _num_rows(tensor: ShardTensor) -> int:
    """Rows that can be kept apart; a tensor without bytes or dimensions is one piece."""
    return tensor.shape[0] if tensor.shape and tensor.nbytes else 1


def _bad_rows(tensor: ShardTensor, damage: Iterable[Range]) -> list[Range]:
    """The rows that damage touches, in order, no two of them adjacent."""
    row_bytes = tensor.nbytes // _num_rows(tensor)
    rows: list[Range] = []
    for start, end in sorted(damage):
        first = max(start - tensor.byte_offset, 0)
        last = min(end - tensor.byte_offset, tensor.nbytes)
        if first >= last:
            continue
        touched = (first // row_bytes, -(-last // row_bytes))
        if rows and touched[0] <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(rows[-1][1], touched[1]))
        else:
            rows.append(touched)
    return rows


def _without(ranges: Sequence[Range], cut: Sequence[Range]) -> list[Range]:
    """What is left of `ranges`; both are in order and overlap nowhere among themselves."""
    left = []
    for first, last in ranges:
        for start, end in cut:
            if end <= first or start >= last:
                continue
            if start > first:
                left.append((first, start))
            first = end
        if first < last:
            left.append((first, last))
    return left


def _piece(part: int, tensor: ShardTensor, rows: Range) -> Piece:
    first, last = rows
    row_bytes = tensor.nbytes // _num_rows(tensor)
    offsets, shape = tensor.offsets, tensor.shape
    if shape and tensor.nbytes:
        offsets = (offsets[0] + first, *offsets[1:])
        shape = (last - first, *shape[1:])
    start = tensor.byte_offset + first * row_bytes
    return Piece(
        part=part,
        tensor=tensor,
        offsets=offsets,
        shape=shape,
        start=start,
        end=start + (last - first) * row_bytes,
    )


def _missing(kept: Sequence[Piece], lost: Sequence[Piece]) -> Missing | None:
    """What of a tensor no record places anywhere; records that contradict each other place it."""
    first = (*kept, *lost)[0].tensor
    placed = sum(math.prod(piece.shape) for piece in (*kept, *lost))
    num_elements = math.prod(first.global_shape) - placed
    if num_elements <= 0:
        return None
    return Missing(
        tensor=first.name,
        dtype=first.dtype,
        global_shape=first.global_shape,
        num_elements=num_elements,
    )


def _length(ranges: Iterable[Range]) -> int:
    return sum(last - first for first, last in ranges)
