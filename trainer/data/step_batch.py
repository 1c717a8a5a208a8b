"""What a replica reads for one step, in flat memory that several ranks can share.

Ids take 32 bits there, which every vocabulary fits: a rank makes what a model takes, 64 bits, of
the parts that its stage needs. Whether the memory is a rank's own or comes from the node's loader,
what is made of it is the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import torch
from torch import Tensor

from trainer.parallel.pipeline import MicroBatch

Memory = bytearray | mmap

_MAGIC = b"OUTLSB01"
# Magic, step, replica; micro-batches M, tokens S, sequences B, and whether there are starts.
_HEADER = struct.Struct("<8sqqIIII")
_IDS = np.dtype("<i4")
_COUNTS = np.dtype("<i8")
_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which parts of a batch a rank takes: the first stage tokens, the last one targets."""

    tokens: bool = True
    targets: bool = True
    starts: bool = True

    @property
    def is_nothing(self) -> bool:
        """As of a stage in the middle whose attention sees whole sequences."""
        return not (self.tokens or self.targets or self.starts)


class StepBatch:
    """The micro-batches of one replica's step.

    The memory holds a header, how many targets of each micro-batch have a loss [M], then tokens,
    targets and, where there are any, starts, each [M, S, B].
    """

    def __init__(self, memory: Memory, *, step: int, replica: int) -> None:
        """Look into it.

        Raises:
            ValueError: it is of another step or replica, or no batch.
        """
        magic, *of, self._m, self._s, self._b, has_starts = _HEADER.unpack_from(memory)
        if magic != _MAGIC or of != [step, replica]:
            raise ValueError(f"{magic!r} of {of} is not the batch of step {step}, {replica=}")
        self._memory = memory
        self._has_starts = bool(has_starts)

    @classmethod
    def write(
        cls,
        read: Callable[[int], MicroBatch],
        num_micro_batches: int,
        *,
        step: int,
        replica: int,
        allocate: Callable[[int], Memory],
    ) -> StepBatch:
        """Read micro-batches by number into as much memory as they need."""
        first = read(0)
        shape = (num_micro_batches, *first.tokens.shape)
        parts = 2 if first.starts is None else 3
        num_bytes = _COUNTS.itemsize * num_micro_batches
        num_bytes += parts * _IDS.itemsize * int(np.prod(shape))
        memory = allocate(_HEADER.size + num_bytes)
        _HEADER.pack_into(memory, 0, _MAGIC, step, replica, *shape, int(parts == 3))
        batch = cls(memory, step=step, replica=replica)
        counts, arrays = batch._counts(), [batch._part(index) for index in range(parts)]
        for number in range(num_micro_batches):
            micro_batch = first if number == 0 else read(number)
            counts[number] = micro_batch.num_predicted
            values = (micro_batch.tokens, micro_batch.targets, micro_batch.starts)
            for array, value in zip(arrays, values, strict=False):
                assert value is not None, "micro-batches of a step have the same parts"
                # No id is lost: a smaller vocabulary was checked where they were read.
                np.copyto(array[number], value.numpy(), casting="same_kind")
        return batch

    @staticmethod
    def of_nothing(num_micro_batches: int) -> list[MicroBatch]:
        """Micro-batches for who wants nothing."""
        return [MicroBatch(tokens=_NOTHING, targets=_NOTHING)] * num_micro_batches

    def on_host(self, wanted: Wanted, *, pinned: bool) -> list[MicroBatch]:
        """Copies of the parts that are wanted; `pinned`: of 32 bits, in page-locked memory."""
        tokens = self._copy(0, pinned) if wanted.tokens else None
        targets = self._copy(1, pinned) if wanted.targets else None
        has_starts = self._has_starts and wanted.starts
        starts = self._copy(2, pinned) if has_starts else None
        counts = self._counts().tolist()
        return [
            MicroBatch(
                tokens=_NOTHING if tokens is None else tokens[number],
                targets=_NOTHING if targets is None else targets[number],
                starts=None if starts is None else starts[number],
                num_predicted=counts[number],
            )
            for number in range(self._m)
        ]

    def _copy(self, index: int, pinned: bool) -> Tensor:
        part = self._part(index)
        if pinned:
            return torch.from_numpy(part.copy()).pin_memory()
        return torch.from_numpy(part.astype(np.int64))

    def _counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(self._memory, _COUNTS, self._m, _HEADER.size)

    def _part(self, index: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int32]]:
        number = self._m * self._s * self._b
        begin = _HEADER.size + _COUNTS.itemsize * self._m + index * number * _IDS.itemsize
        flat = np.frombuffer(self._memory, _IDS, number, begin)
        return flat.reshape(self._m, self._s, self._b)
