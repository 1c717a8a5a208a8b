"""Tensors that are copied together: consecutive ones, of some megabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


class Batches:
    """Tensors in their order, in batches of about `most_bytes`; a larger one is alone."""

    def __init__(self, tensors: Sequence[Tensor], most_bytes: int) -> None:
        self._tensors = list(tensors)
        self._slices = list(_slices(tensors, most_bytes))
        # Of a range of memory: the last of the batches with a tensor that lies in it.
        self._last_within: dict[tuple[int, int], int] = {}

    def __iter__(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Each batch, and where it lies among all tensors."""
        return ((batch, self._tensors[batch]) for batch in self._slices)

    def move(self, tensors: Sequence[Tensor]) -> None:
        """The same tensors from now on, at other places."""
        self._tensors = list(tensors)
        self._last_within.clear()

    def last_within(self, tensor: Tensor) -> int:
        """Of the batches with tensors in this one's memory, the last; -1: none."""
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        if (begin, end) not in self._last_within:
            self._last_within[begin, end] = max(
                (
                    index
                    for index, (_, batch) in enumerate(self)
                    for source in batch
                    if source.data_ptr() < end and begin < source.data_ptr() + source.nbytes
                ),
                default=-1,
            )
        return self._last_within[begin, end]


def _slices(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[slice]:
    begin, nbytes = 0, 0
    for index, tensor in enumerate(tensors):
        if index > begin and nbytes + tensor.nbytes > most_bytes:
            yield slice(begin, index)
            begin, nbytes = index, 0
        nbytes += tensor.nbytes
    if tensors:
        yield slice(begin, len(tensors))
