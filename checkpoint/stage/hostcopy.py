"""Copies between tensors in host memory, as fast as this process can.

torch copies with plain vector loads and stores, over as many threads as it may use. `memmove`
takes one, but on some processors it overwrites lines of memory without reading them first, and
then takes 0.7 times as long as torch on one thread; on others it takes 1.08 times as long.
Which one wins shows only when both are tried (`FasterCopy`).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Copy = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Copies each of the second into its place among the first."""

# Copies of fewer bytes say little about how fast either is.
_LEAST_BYTES = 4 << 20
_TRIES = 4


@torch.no_grad()
def copy_by_memmove(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Bytes by `memmove`, wherever source and destination have the same layout."""
    for target, source in zip(into, sources, strict=True):
        if _has_same_bytes(target, source):
            # It leaves the interpreter to other threads meanwhile.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)


@torch.no_grad()
def copy_by_torch(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """In one call, which lets other threads run Python from its beginning to its end."""
    if sources:
        torch._foreach_copy_(list(into), list(sources))


class FasterCopy:
    """Copies in whichever way is faster here; large copies take turns until that is known."""

    def __init__(
        self,
        ways: Sequence[Copy] = (copy_by_memmove, copy_by_torch),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways = ways
        self._clock = clock
        # Of each way, seconds per byte.
        self._tried: list[list[float]] = [[] for _ in ways]
        self._chosen: Copy | None = None

    def __call__(self, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        if self._chosen is not None:
            self._chosen(into, sources)
        elif (nbytes := sum(source.nbytes for source in sources)) < _LEAST_BYTES:
            self._ways[0](into, sources)
        else:
            self._try(into, sources, nbytes)

    def _try(self, into: Sequence[Tensor], sources: Sequence[Tensor], nbytes: int) -> None:
        turn = min(range(len(self._ways)), key=lambda index: len(self._tried[index]))
        begin_s = self._clock()
        self._ways[turn](into, sources)
        self._tried[turn].append((self._clock() - begin_s) / nbytes)
        if all(len(tried) == _TRIES for tried in self._tried):
            medians = [statistics.median(tried) for tried in self._tried]
            self._chosen = self._ways[medians.index(min(medians))]


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor in host memory, which they keep there.

    `Tensor.numpy` does as much where there is numpy.
    """
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    held = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    held.owner = tensor  # type: ignore[attr-defined]  # theirs take any attribute
    return memoryview(held).cast("B")


def _has_same_bytes(into: Tensor, source: Tensor) -> bool:
    """Whether a copy of the bytes is a copy of the tensor."""
    return (
        into.dtype == source.dtype
        and into.shape == source.shape
        and into.is_contiguous()
        and source.is_contiguous()
        and into.is_cpu
        and source.is_cpu
        and not (source.is_conj() or source.is_neg())
    )
