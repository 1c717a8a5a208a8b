"""What a replica reads for one step, in flat memory that several ranks can share.

Ids take 32 bits there, which every vocabulary fits: a rank makes what a model takes, 64 bits, of
the parts that its stage needs. Whether the memory is a rank's own or comes from the node's loader,
what is made of it is the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import torch
from torch import Tensor

from trainer.parallel.pipeline import MicroBatch, Sentences

Memory = bytearray | mmap
Ids = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_MAGIC = b"OUTLSB02"
# Magic, step, replica; micro-batches M, tokens S, sequences B; whether there are starts, and
# sentences.
_HEADER = struct.Struct("<8sqqIIIHH")
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
    targets and, where there are any, starts, and segments of sentences, each [M, S, B], with
    whether these are swapped, [M, B].
    """

    def __init__(self, memory: Memory, *, step: int, replica: int) -> None:
        """Look into it.

        Raises:
            ValueError: it is of another step or replica, or no batch.
        """
        magic, *of, self._m, self._s, self._b, starts, sentences = _HEADER.unpack_from(memory)
        if magic != _MAGIC or of != [step, replica]:
            raise ValueError(f"{magic!r} of {of} is not the batch of step {step}, {replica=}")
        self._memory = memory
        self._has_starts, self._has_sentences = bool(starts), bool(sentences)

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
        num_ids = sum(part.numel() for part in _parts(first))
        num_bytes = (_COUNTS.itemsize + num_ids * _IDS.itemsize) * num_micro_batches
        memory = allocate(_HEADER.size + num_bytes)
        has = (int(part is not None) for part in (first.starts, first.sentences))
        _HEADER.pack_into(memory, 0, _MAGIC, step, replica, *shape, *has)
        batch = cls(memory, step=step, replica=replica)
        counts, arrays = batch._counts(), batch._arrays()
        for number in range(num_micro_batches):
            micro_batch = first if number == 0 else read(number)
            counts[number] = micro_batch.num_predicted
            # Micro-batches of a step have the same parts.
            for array, value in zip(arrays, _parts(micro_batch), strict=True):
                # No id is lost: a smaller vocabulary was checked where they were read.
                np.copyto(array[number], value.numpy(), casting="same_kind")
        return batch

    @staticmethod
    def of_nothing(num_micro_batches: int) -> list[MicroBatch]:
        """Micro-batches for who wants nothing."""
        return [MicroBatch(tokens=_NOTHING, targets=_NOTHING)] * num_micro_batches

    def on_host(self, wanted: Wanted, *, pinned: bool) -> list[MicroBatch]:
        """Copies of the parts that are wanted; `pinned`: of 32 bits, in page-locked memory."""
        is_wanted = [wanted.tokens, wanted.targets]
        is_wanted += [wanted.starts] * self._has_starts
        # The first stage has the table of segments, the last one the loss of their order.
        is_wanted += [wanted.tokens, wanted.targets] * self._has_sentences
        copies = [
            list(_copy(array, pinned)) if takes else [_NOTHING] * self._m
            for array, takes in zip(self._arrays(), is_wanted, strict=True)
        ]
        batches = []
        for (tokens, targets, *more), count in zip(
            zip(*copies, strict=True), self._counts().tolist(), strict=True
        ):
            starts = more.pop(0) if self._has_starts else None
            batches.append(
                MicroBatch(
                    tokens=tokens,
                    targets=targets,
                    starts=starts if wanted.starts else None,
                    sentences=Sentences(segments=more[0], swapped=more[1]) if more else None,
                    num_predicted=count,
                )
            )
        return batches

    def _counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(self._memory, _COUNTS, self._m, _HEADER.size)

    def _arrays(self) -> list[Ids]:
        """Its parts, in the order of `_parts`."""
        of_tokens, of_sequences = (self._m, self._s, self._b), (self._m, self._b)
        shapes: list[tuple[int, ...]] = [of_tokens] * (2 + self._has_starts)
        shapes += [of_tokens, of_sequences] * self._has_sentences
        begin, found = _HEADER.size + _COUNTS.itemsize * self._m, []
        for shape in shapes:
            array = np.frombuffer(self._memory, _IDS, math.prod(shape), begin)
            found.append(array.reshape(shape))
            begin += array.nbytes
        return found


def _parts(batch: MicroBatch) -> list[Tensor]:
    """What of a micro-batch is kept: tensors of ids."""
    parts = [batch.tokens, batch.targets]
    if batch.starts is not None:
        parts.append(batch.starts)
    if batch.sentences is not None:
        parts += [batch.sentences.segments, batch.sentences.swapped]
    return parts


def _copy(array: Ids, pinned: bool) -> Tensor:
    if pinned:
        return torch.from_numpy(array.copy()).pin_memory()
    return torch.from_numpy(array.astype(np.int64))
