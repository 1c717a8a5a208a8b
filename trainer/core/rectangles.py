"""A contiguous range of a tensor's elements, as the rectangles that make it up.

A ZeRO shard is cut without regard for rows; a checkpoint knows rectangles, so
that any layout can later say which bytes it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle that is contiguous in the tensor; `start` is its first element."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements start..stop-1 of a tensor of `shape`, row-major, as boxes in order.

    There are at most 2n - 1 of them for n dimensions: the rest of a first row, whole
    rows, the beginning of a last one, in every dimension but the innermost.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box(offsets=(start,), shape=(stop - start,), start=start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _inside(shape, start, stop, row)
        return
    if start < first * row:
        yield from _inside(shape, start, first * row, row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box(offsets=(first, *zeros), shape=(last - first, *shape[1:]), start=first * row)
    if last * row < stop:
        yield from _inside(shape, last * row, stop, row)


def _inside(shape: Sequence[int], start: int, stop: int, row: int) -> Iterator[Box]:
    """As `boxes`, for a range within one row of the outermost dimension."""
    index = start // row
    base = index * row
    for box in boxes(shape[1:], start - base, stop - base):
        yield Box(offsets=(index, *box.offsets), shape=(1, *box.shape), start=base + box.start)
