"""The micro-batches of a step, as a function of the step number.

There is no iterator to save: `trainer.core.batch` computes what any step reads,
so a resumed run reads exactly what it would have read.

`prepare` has a step read ahead on a thread of its own, while the trainer computes or
waits for gradients: reading is then off the critical path, and what is read stays the same.
The look-ahead is one step, so memory is bounded. Where it is read, in this process
or in the node's loader (`trainer.data.node`), is its source's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from outlast.clock import node_time_ns
from trainer.data.step_batch import NOTHING, Memory, Parts, StepBatch, Wanted
from trainer.parallel.pipeline import MicroBatch, Sentences

_Sample = TypeVar("_Sample")
_Sample_co = TypeVar("_Sample_co", covariant=True)
_Sample_contra = TypeVar("_Sample_contra", contravariant=True)


class Plan(Protocol[_Sample_co]):
    """Which samples a micro-batch reads, as `trainer.core.batch` has it."""

    @property
    def num_micro_batches(self) -> int: ...

    def samples(self, step: int, replica: int, micro_batch: int) -> tuple[_Sample_co, ...]: ...


class Dataset(Protocol[_Sample_contra]):
    """Where they are read from."""

    def read(self, samples: Sequence[_Sample_contra]) -> MicroBatch: ...


class Source(Protocol):
    """Where a loader has a step from."""

    reads_elsewhere: bool
    """In another process, ahead of who asks."""

    @property
    def num_micro_batches(self) -> int: ...

    def read(self, step: int, replica: int, parts: Parts) -> StepBatch: ...

    def close(self) -> None: ...


class Split:
    """What is trained on, or what is held out: the source of a rank that reads by itself."""

    reads_elsewhere = False

    def __init__(
        self,
        dataset: Dataset[_Sample],
        plan: Plan[_Sample],
        transform: Callable[[MicroBatch, int, Sequence[_Sample]], MicroBatch] | None = None,
        *,
        starts: Callable[[Sequence[_Sample]], Tensor] | None = None,
        prefetch: Callable[[Sequence[_Sample]], None] | None = None,
    ) -> None:
        """`transform` changes a micro-batch, given with its step and its samples.

        `starts` gives where documents begin in samples without reading their tokens, [S, B], of
        a dataset whose sequences come with documents; `transform` leaves them as they are.
        `prefetch` begins to fetch samples that will be read, of a dataset that is remote.
        """

        def begin(step: int, replica: int) -> None:
            assert prefetch is not None
            parts = (plan.samples(step, replica, each) for each in range(plan.num_micro_batches))
            prefetch([sample for part in parts for sample in part])

        def read(step: int, replica: int, index: int, parts: Parts) -> MicroBatch:
            samples = plan.samples(step, replica, index)
            if parts is Parts.STARTS:
                assert starts is not None, "only a dataset with documents is asked for them"
                return MicroBatch(tokens=NOTHING, targets=NOTHING, starts=starts(samples))
            batch = dataset.read(samples)
            return batch if transform is None else transform(batch, step, samples)

        self._read = read
        self._begin = None if prefetch is None else begin
        self.num_micro_batches = plan.num_micro_batches

    def read(
        self,
        step: int,
        replica: int,
        parts: Parts,
        *,
        allocate: Callable[[int], Memory] = bytearray,
    ) -> StepBatch:
        """What a replica reads at a step, in memory that `allocate` gives."""
        if self._begin is not None and parts is Parts.WHOLE:
            # All of this step at once and not one sample after the other, and behind it the next
            # step, which is on its way while this one is trained on.
            self._begin(step, replica)
            self._begin(step + 1, replica)
        return StepBatch.write(
            lambda index: self._read(step, replica, index, parts),
            self.num_micro_batches,
            step=step,
            replica=replica,
            allocate=allocate,
        )

    def close(self) -> None:
        """Nothing is held."""


class Loader:
    """One replica's view of a split."""

    def __init__(
        self,
        source: Source,
        *,
        replica: int,
        device: torch.device,
        wanted: Wanted | None = None,
    ) -> None:
        self._source = source
        self._replica = replica
        self._device = device
        self._wanted = Wanted() if wanted is None else wanted
        self.reads_elsewhere = source.reads_elsewhere
        self._parts = self._wanted.parts
        # It starts its thread at the first use: workers are forked with a single thread.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._prepared: tuple[int, Future[list[MicroBatch]]] | None = None
        # For how long the newest step's data was waited for; 0 where it had been read before.
        self.last_wait_ns = 0

    def prepare(self, step: int) -> None:
        """Begin to read `step` in the background; `micro_batches` will have it at hand.

        Call it once for each step at most, from the thread that trains.
        """
        if self._parts is None:
            return
        if self._prepared is not None and self._prepared[0] != step:
            # One look-ahead at a time; what nobody will take may still be read to its end.
            self._prepared[1].cancel()
        self._prepared = step, self._reader.submit(self._read, step, self._replica, self._parts)

    def micro_batches(self, step: int, *, replica: int | None = None) -> list[MicroBatch]:
        """What a replica reads at `step`, counted from 1: this one, unless another is given.

        Parts that are not wanted are empty, and `num_predicted` is 0 for who wants neither tokens
        nor targets. What went wrong in the background is raised here.
        """
        if self._parts is None:
            return StepBatch.of_nothing(self._source.num_micro_batches)
        prepared, self._prepared = self._prepared, None
        began_ns = node_time_ns()
        is_read = False
        if prepared is not None and prepared[0] == step and replica is None:
            is_read = prepared[1].done()
            batches = prepared[1].result()
        else:
            replica = self._replica if replica is None else replica
            batches = self._read(step, replica, self._parts)
        self.last_wait_ns = 0 if is_read else node_time_ns() - began_ns
        return [_each(batch, self._to_device) for batch in batches]

    def close(self) -> None:
        """End the thread; a read under way is waited for."""
        self._prepared = None
        self._reader.shutdown(cancel_futures=True)
        self._source.close()

    def _read(self, step: int, replica: int, parts: Parts) -> list[MicroBatch]:
        # Only page-locked memory is copied to a GPU without waiting.
        pinned = self._device.type == "cuda"
        return self._source.read(step, replica, parts).on_host(self._wanted, pinned=pinned)

    def _to_device(self, ids: Tensor) -> Tensor:
        # Of 32 bits on the way to a GPU.
        return ids.to(self._device, non_blocking=True).long()


def _each(batch: MicroBatch, change: Callable[[Tensor], Tensor]) -> MicroBatch:
    return MicroBatch(
        tokens=change(batch.tokens),
        targets=change(batch.targets),
        starts=None if batch.starts is None else change(batch.starts),
        sentences=None
        if (parts := batch.sentences) is None
        else Sentences(segments=change(parts.segments), swapped=change(parts.swapped)),
        num_predicted=batch.num_predicted,
    )
