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
from enum import IntEnum
from mmap import mmap

import numpy as np
import torch
from torch import Tensor

from trainer.core.context import own_places
from trainer.parallel.pipeline import MicroBatch, Sentences

Memory = bytearray | mmap
Ids = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_MAGIC = b"OUTLSB03"
# Magic, step, replica; micro-batches M, tokens S, sequences B; whether there are tokens, starts and
# sentences. Padded to a multiple of 8 bytes, for the numbers behind it.
_HEADER = struct.Struct("<8sqqIII???x")
_IDS = np.dtype("<i4")
_COUNTS = np.dtype("<i8")
NOTHING = torch.empty(0, dtype=torch.int64)


class Parts(IntEnum):
    """What is read of a step."""

    WHOLE = 0
    STARTS = 1
    """Where documents begin, and no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which parts of a batch a rank takes: the first stage tokens, the last one targets.

    Of these it takes one of `num_parts` of the sequence, as attention `in_ring` has it or not; of
    what else there is, the whole.
    """

    tokens: bool = True
    targets: bool = True
    starts: bool = True
    part: int = 0
    num_parts: int = 1
    in_ring: bool = False

    @property
    def parts(self) -> Parts | None:
        """What has to be read for it; None: nothing.

        A stage in the middle has a use for no tokens. Its attention needs where documents begin,
        unless it sees whole sequences.
        """
        if self.tokens or self.targets:
            return Parts.WHOLE
        return Parts.STARTS if self.starts else None


class StepBatch:
    """The micro-batches of one replica's step.

    The memory holds a header, how many targets of each micro-batch have a loss [M], then what was
    read of tokens, targets, starts and segments of sentences, each [M, S, B], with whether these
    are swapped, [M, B].
    """

    def __init__(self, memory: Memory, *, step: int, replica: int) -> None:
        """Look into it.

        Raises:
            ValueError: it is of another step or replica, or no batch.
        """
        magic, *of, self._m, self._s, self._b, tokens, starts, sentences = _HEADER.unpack_from(
            memory
        )
        if magic != _MAGIC or of != [step, replica]:
            raise ValueError(f"{magic!r} of {of} is not the batch of step {step}, {replica=}")
        self._memory = memory
        self._has_tokens, self._has_starts, self._has_sentences = tokens, starts, sentences

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
        parts = _parts(first)
        # Of tokens, or of starts where these are all that was read.
        shape = (num_micro_batches, *next(iter(parts.values())).shape)
        num_ids = sum(part.numel() for part in parts.values())
        num_bytes = (_COUNTS.itemsize + num_ids * _IDS.itemsize) * num_micro_batches
        memory = allocate(_HEADER.size + num_bytes)
        has = (name in parts for name in ("tokens", "starts", "segments"))
        _HEADER.pack_into(memory, 0, _MAGIC, step, replica, *shape, *has)
        batch = cls(memory, step=step, replica=replica)
        counts, arrays = batch._counts(), batch._arrays()
        for number in range(num_micro_batches):
            micro_batch = first if number == 0 else read(number)
            counts[number] = micro_batch.num_predicted
            # Micro-batches of a step have the same parts.
            for name, value in _parts(micro_batch).items():
                # No id is lost: a smaller vocabulary was checked where they were read.
                np.copyto(arrays[name][number], value.numpy(), casting="same_kind")
        return batch

    @staticmethod
    def of_nothing(num_micro_batches: int) -> list[MicroBatch]:
        """Micro-batches for who wants nothing."""
        return [MicroBatch(tokens=NOTHING, targets=NOTHING)] * num_micro_batches

    def on_host(self, wanted: Wanted, *, pinned: bool) -> list[MicroBatch]:
        """Copies of the parts that are wanted; `pinned`: of 32 bits, in page-locked memory.

        `num_predicted` counts the targets that are taken.
        """
        takes = {
            "tokens": wanted.tokens,
            "targets": wanted.targets,
            "starts": wanted.starts,
            # The first stage has the table of segments, the last one the loss of their order.
            "segments": wanted.tokens,
            "swapped": wanted.targets,
        }
        arrays, counts = self._arrays(), self._counts().tolist()
        if wanted.num_parts > 1 and self._has_tokens:
            own = own_places(self._s, wanted.part, wanted.num_parts, in_ring=wanted.in_ring)
            arrays |= {name: arrays[name][:, own] for name in ("tokens", "targets")}
            counts = (arrays["targets"] >= 0).sum(axis=(1, 2)).tolist()
        copies = {name: list(_copy(array, pinned)) for name, array in arrays.items() if takes[name]}

        def micro_batch(number: int) -> MicroBatch:
            def part(name: str) -> Tensor:
                return copies[name][number] if name in copies else NOTHING

            sentences = Sentences(segments=part("segments"), swapped=part("swapped"))
            return MicroBatch(
                tokens=part("tokens"),
                targets=part("targets"),
                starts=part("starts") if "starts" in copies else None,
                sentences=sentences if self._has_sentences else None,
                num_predicted=counts[number],
            )

        return [micro_batch(number) for number in range(self._m)]

    def _counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(self._memory, _COUNTS, self._m, _HEADER.size)

    def _arrays(self) -> dict[str, Ids]:
        """Its parts, in the order of `_parts`."""
        of_tokens, of_sequences = (self._m, self._s, self._b), (self._m, self._b)
        shapes: dict[str, tuple[int, ...]] = {}
        if self._has_tokens:
            shapes |= {"tokens": of_tokens, "targets": of_tokens}
        if self._has_starts:
            shapes |= {"starts": of_tokens}
        if self._has_sentences:
            shapes |= {"segments": of_tokens, "swapped": of_sequences}
        begin, found = _HEADER.size + _COUNTS.itemsize * self._m, {}
        for name, shape in shapes.items():
            array = np.frombuffer(self._memory, _IDS, math.prod(shape), begin)
            found[name] = array.reshape(shape)
            begin += array.nbytes
        return found


def _parts(batch: MicroBatch) -> dict[str, Tensor]:
    """What of a micro-batch is kept: tensors of ids, those of tokens first."""
    parts: dict[str, Tensor] = {}
    if batch.tokens.numel():
        parts |= {"tokens": batch.tokens, "targets": batch.targets}
    if batch.starts is not None:
        parts |= {"starts": batch.starts}
    if batch.sentences is not None:
        parts |= {"segments": batch.sentences.segments, "swapped": batch.sentences.swapped}
    return parts


def _copy(array: Ids, pinned: bool) -> Tensor:
    if pinned:
        return torch.from_numpy(array.copy()).pin_memory()
    return torch.from_numpy(array.astype(np.int64))
