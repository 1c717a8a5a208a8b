"""The parameters of a rank and where they lie in memory.

Every parallel module declares its parameters with their global shape; the
shard that a rank holds follows from the mesh. `FlatParameters` then lays all
of a rank's parameters, and their gradients, into buckets (`buckets.py`), so
that synchronisation, clipping and the optimizer are a few operations on slices.

With ZeRO a rank keeps only its own range of each bucket of what its level
names: optimizer state (1), gradients (2), parameters (3). Buffers that are
there only while they are used keep their tensors and lose their memory: the
graph of a forward pass refers to those tensors.

What does not belong here: when something is exchanged (`trainer.parallel.zero`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.model.buckets import Bucket, overlap, plan_buckets
from trainer.model.facts import ParameterFacts
from trainer.parallel.comm import Comm

__all__ = ["FlatParameters", "ParallelModule", "ParameterFacts", "Part", "Piece", "Sharding"]


class ParallelModule(nn.Module):
    """A module that declares its parameters by their global shape."""

    def __init__(self, comm: Comm, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.comm = comm
        self.facts: dict[str, ParameterFacts] = {}
        self._dtype = dtype
        self._device = device

    def declare(
        self,
        name: str,
        global_shape: tuple[int, ...],
        *,
        init: Literal["normal", "zeros", "ones"],
        std: float = 0.0,
        shard_dim: int | None = None,
        tied: bool = False,
        counted: bool = True,
        held: tuple[int, int] | None = None,
        stored: str = "",
        stacked: bool = False,
        divided: Comm | None = None,
    ) -> nn.Parameter:
        """Register a parameter, split over the group along `shard_dim` if given.

        `held` says where this rank's part starts and how long it is; all ranks have as much in
        their order unless given. `stored` is the name of the whole tensor, if it is another.
        `divided` has the ranks that divide the first dimension among them besides.
        """
        shape, offsets = list(global_shape), [0] * len(global_shape)
        if shard_dim is not None:
            each = global_shape[shard_dim] // self.comm.size
            offsets[shard_dim], shape[shard_dim] = held or (self.comm.index * each, each)
        if divided is not None:
            each = global_shape[0] // divided.size
            offsets[0], shape[0] = divided.index * each, each
        self.facts[name] = ParameterFacts(
            global_shape=global_shape,
            offsets=tuple(offsets),
            shape=tuple(shape),
            init=init,
            std=std,
            tied=tied,
            counted=counted,
            stored=stored or name,
            stacked=stacked,
            divided=divided is not None and divided.size > 1,
        )
        parameter = nn.Parameter(torch.empty(shape, dtype=self._dtype, device=self._device))
        self.register_parameter(name, parameter)
        return parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What replicas share: the ZeRO level, and which of `count` shards are this rank's.

    `divided` is the same of experts that replicas divide among them: fewer hold the same ones.
    """

    level: int = 0
    index: int = 0
    count: int = 1
    divided: tuple[int, int] | None = None

    def of(self, bucket: Bucket) -> tuple[int, int]:
        """Which shard of a bucket is this rank's, and of how many."""
        if bucket.divided and self.divided is not None:
            return self.divided
        return self.index, self.count

    def shard(self, bucket: Bucket) -> slice:
        """This rank's range of a bucket."""
        return bucket.shard(*self.of(bucket))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive elements of one parameter that this rank updates.

    `inside` counts from the start of the parameter's shard, `at` from the start of the
    part, `place` from the start of a buffer of optimizer state.
    """

    name: str
    inside: slice
    at: slice
    place: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What this rank updates of one bucket: all of it, or its shard with ZeRO.

    `owned` is its range of the bucket and `place` its range of a buffer of optimizer
    state. `master` holds the weights that the optimizer sees, `grads` their sums;
    `all_values` and `all_grads` are the whole bucket's, as the model uses them.
    """

    bucket: Bucket
    owned: slice
    place: slice
    master: Tensor
    grads: Tensor
    all_values: Tensor
    all_grads: Tensor
    pieces: tuple[Piece, ...]

    def among(self, of_bucket: slice) -> slice:
        """What this part has of a slice of the bucket, counted from its own start."""
        shared = overlap(of_bucket, self.owned)
        return slice(shared.start - self.owned.start, shared.stop - self.owned.start)


class FlatParameters:
    """The buckets of a rank: values as the model uses them, gradients, and the own part.

    Sums of gradients and the optimizer's weights are fp32 where the model's are
    narrower, else of the model's own type.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], *, tp_size: int, sharding: Sharding | None = None
    ) -> None:
        self.sharding = sharding or Sharding()
        # Alone, a rank keeps everything whatever the level says.
        self.level = self.sharding.level if self.sharding.count > 1 else 0
        self.facts = {
            name: facts for chunk in chunks for name, facts in _collect_facts(chunk).items()
        }
        self.parameters = {
            name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()
        }
        self.buckets = plan_buckets(chunks, self.facts, tp_size=tp_size)
        like = next(iter(self.parameters.values())).detach()
        self.dtype = like.dtype
        self.sum_dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        counts = [self.sharding.of(bucket)[1] for bucket in self.buckets]
        shares = [
            -(-bucket.size // count) for bucket, count in zip(self.buckets, counts, strict=True)
        ]
        self._lengths = [share * count for share, count in zip(shares, counts, strict=True)]
        self._starts = [sum(self._lengths[:index]) for index in range(len(self.buckets))]
        total = sum(self._lengths)
        # Whole buffers, or none: those of a level are there bucket by bucket while used.
        self.values = like.new_zeros(total if self.level < 3 else 0)
        self.grads = like.new_zeros(total if self.level < 2 else 0, dtype=self.sum_dtype)
        self.owned_size = sum(shares) if self.level else total
        self.parts = tuple(self._make_parts())

    @property
    def moves_grads(self) -> bool:
        """Whether gradients come to rest elsewhere than where autograd adds them up."""
        return self.level >= 2 or self.dtype is not self.sum_dtype

    @property
    def has_master(self) -> bool:
        """Whether the optimizer's weights lie elsewhere than the model's."""
        return self.level == 3 or self.dtype is not self.sum_dtype

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a whole buffer that belongs to one parameter, in its shape."""
        for start, bucket in zip(self._starts, self.buckets, strict=True):
            if name in bucket.slices:
                part = bucket.slices[name]
                return flat[start + part.start : start + part.stop].view(self.facts[name].shape)
        raise KeyError(name)

    def new_state(self) -> Tensor:
        """A zeroed buffer of optimizer state for the own parts."""
        return self.grads.new_zeros(self.owned_size)

    def initialise(self, seed: int) -> None:
        """Initial values, the same on every layout. With ZeRO, of the own parts only."""
        for part in self.parts:
            for piece in part.pieces:
                facts = self.facts[piece.name]
                initial = facts.initial(seed, facts.stored)
                part.master[piece.at].copy_(initial.reshape(-1)[piece.inside])
            if self.level == 0:
                self.publish(part)

    def forget(self) -> None:
        """Be as if just made, but for what buffers hold that stay: a step was given up."""
        for part in self.parts:
            if self.level == 3:
                drop_memory(part.all_values)
            if self.level >= 2:
                drop_memory(part.all_grads)
        for parameter in self.parameters.values() if self.moves_grads else ():
            parameter.grad = None

    def publish(self, part: Part) -> None:
        """Give the model the own part of the optimizer's weights."""
        if self.has_master:
            part.all_values[part.owned].copy_(part.master)

    def _buffer(self, whole: Tensor, index: int) -> Tensor:
        """A bucket's range of a whole buffer, or memory of its own where there is none."""
        start, length = self._starts[index], self._lengths[index]
        return whole[start : start + length] if whole.numel() else whole.new_empty(length)

    def _bind(self, part: Part) -> None:
        """Let the model's parameters, and their gradients, be views of their bucket."""
        for name, place in part.bucket.slices.items():
            shape = self.facts[name].shape
            self.parameters[name].data = part.all_values[place].view(shape)
            if not self.moves_grads:
                self.parameters[name].grad = part.all_grads[place].view(shape)

    def _make_parts(self) -> Iterator[Part]:
        size, like = self.owned_size, self.grads
        masters = like.new_zeros(size) if self.has_master else None
        sums = like.new_zeros(size) if self.level >= 2 else None
        start = 0
        for index, bucket in enumerate(self.buckets):
            owned = slice(0, self._lengths[index])
            if self.level:
                owned = self.sharding.shard(bucket)
            place = slice(start, start + owned.stop - owned.start)
            values, grads = self._buffer(self.values, index), self._buffer(self.grads, index)
            part = Part(
                bucket=bucket,
                owned=owned,
                place=place,
                master=values[owned] if masters is None else masters[place],
                grads=grads[owned] if sums is None else sums[place],
                all_values=values,
                all_grads=grads,
                pieces=tuple(_pieces(bucket, owned, start)),
            )
            self._bind(part)
            # Bucket by bucket: a model whose weights never fit at once must still be built.
            if self.level == 3:
                drop_memory(values)
            if self.level >= 2:
                drop_memory(grads)
            yield part
            start = place.stop


def has_memory(buffer: Tensor) -> bool:
    """Whether a bucket's buffer can be used now."""
    return buffer.untyped_storage().size() > 0


def restore_memory(buffer: Tensor) -> None:
    """Give a buffer whose memory was dropped new memory; what it holds is undefined."""
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def drop_memory(buffer: Tensor) -> None:
    """Give up the memory of a bucket's buffer; its tensors stay."""
    buffer.untyped_storage().resize_(0)


def _pieces(bucket: Bucket, owned: slice, start: int) -> Iterator[Piece]:
    for name, part in bucket.slices.items():
        shared = overlap(part, owned)
        if shared.start < shared.stop:
            at = slice(shared.start - owned.start, shared.stop - owned.start)
            yield Piece(
                name=name,
                inside=slice(shared.start - part.start, shared.stop - part.start),
                at=at,
                place=slice(start + at.start, start + at.stop),
            )


def _collect_facts(module: nn.Module) -> dict[str, ParameterFacts]:
    return {
        _below(path, name): replace(facts, stored=_below(path, facts.stored))
        for path, part in module.named_modules()
        if isinstance(part, ParallelModule)
        for name, facts in part.facts.items()
    }


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
