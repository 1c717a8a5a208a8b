"""What two rectangles of one tensor share, as bytes of both.

A rectangle lies in memory row by row, so what another one has of it is runs of
bytes at even distances: a strided range. It is copied in one operation, however
many rows it has, and it can be cut at any byte of its source, because files are
read in blocks that know nothing of tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a tensor: where it begins in each dimension, and how far it goes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of it."""
        return math.prod(self.shape)

    def shared(self, other: Box) -> Box | None:
        """What lies in both; None where that is nothing."""
        pairs = list(zip(self.offsets, self.shape, other.offsets, other.shape, strict=True))
        first = tuple(max(mine, its) for mine, _, its, _ in pairs)
        last = tuple(min(mine + size, its + its_size) for mine, size, its, its_size in pairs)
        shape = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return Box(offsets=first, shape=shape) if all(size > 0 for size in shape) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedRange:
    """`count` runs of `run` bytes; all positions and distances are in bytes.

    `source` counts in the file that the bytes come from, `target` in the tensor
    that they go to.
    """

    source: int
    target: int
    run: int
    count: int
    source_stride: int
    target_stride: int

    @property
    def source_end(self) -> int:
        """Where its last run ends in the source."""
        return self.source + (self.count - 1) * self.source_stride + self.run

    @property
    def nbytes(self) -> int:
        return self.count * self.run

    def cut(self, start: int, end: int) -> Iterator[StridedRange]:
        """What of it comes from bytes `start` to `end` of the source, in order."""
        if self.count == 1:
            yield from self._cut_row(0, start, end)
            return
        # Rows that begin at or after `start`, and rows that end at or before `end`.
        first = -(-(start - self.source) // self.source_stride)
        first = min(self.count, max(0, first))
        stop = (end - self.source - self.run) // self.source_stride + 1
        stop = min(self.count, max(0, stop))
        if first > 0:
            yield from self._cut_row(first - 1, start, end)
        if first < stop:
            yield self._rows(first, stop - first)
        # Where one row holds both ends, it has come already.
        if stop < self.count and stop >= first:
            yield from self._cut_row(stop, start, end)

    def _rows(self, first: int, count: int) -> StridedRange:
        return replace(
            self,
            source=self.source + first * self.source_stride,
            target=self.target + first * self.target_stride,
            count=count,
        )

    def _cut_row(self, index: int, start: int, end: int) -> Iterator[StridedRange]:
        row = self._rows(index, 1)
        first, last = max(row.source, start), min(row.source + row.run, end)
        if first < last:
            target = row.target + first - row.source
            yield replace(row, source=first, target=target, run=last - first)


def strided_ranges(
    source: Box, target: Box, *, item_bytes: int, source_at: int
) -> Iterator[StridedRange]:
    """The bytes of `source`, which begins at byte `source_at` of its file, that `target` needs.

    Both are rectangles of one tensor and lie row-major, each in a piece.
    """
    shared = source.shared(target)
    if shared is None:
        return
    from_strides, to_strides = _strides(source.shape), _strides(target.shape)
    first_from = _dot(_minus(shared.offsets, source.offsets), from_strides)
    first_to = _dot(_minus(shared.offsets, target.offsets), to_strides)
    # The innermost dimensions that both have whole are one run; so is what is outside them.
    inner = len(shared.shape)
    run = 1
    while inner > 0:
        inner -= 1
        run *= shared.shape[inner]
        if not shared.shape[inner] == source.shape[inner] == target.shape[inner]:
            break
    outer = max(0, inner - 1)
    count = shared.shape[outer] if inner > 0 else 1
    for index in itertools.product(*(range(size) for size in shared.shape[:outer])):
        yield StridedRange(
            source=source_at + item_bytes * (first_from + _dot(index, from_strides)),
            target=item_bytes * (first_to + _dot(index, to_strides)),
            run=item_bytes * run,
            count=count,
            source_stride=item_bytes * (from_strides[outer] if inner > 0 else run),
            target_stride=item_bytes * (to_strides[outer] if inner > 0 else run),
        )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next, in each dimension."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _minus(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(left, right, strict=True)]


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    # The index may be of the outermost dimensions only.
    return sum(step * stride for step, stride in zip(index, strides, strict=False))
