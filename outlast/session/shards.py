"""Which part of which whole tensor a rank has: of a DTensor its shard, of any other all of it.

A plain tensor of a model or an optimizer is the same on all ranks, as under DDP; torch's own
distributed checkpoints hold it so, too. One of anything else (the state of a loader, of a random
generator) is each rank's own.

torch's DTensor takes 0.2 s to import: only where a script has done so can it have one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoint.core.ownership import Copies, Held, owned
from checkpoint.stage.payload import NamedTensor
from outlast.worker_contract import rank_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a DTensor is spread over ranks."""

    mesh: Any
    placements: tuple[Placement, ...]

    def part(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and offsets of this rank's part of a tensor."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local, offsets = compute_local_shape_and_global_offset(
            torch.Size(shape), self.mesh, self.placements
        )
        return tuple(local), tuple(offsets)

    def wrap(self, local: Tensor, shape: Sequence[int]) -> DTensor:
        """The DTensor of which `local` is this rank's part."""
        from torch.distributed.tensor import DTensor

        strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
        return DTensor.from_local(
            local.to(self.mesh.device_type),
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(strides),
        )

    @property
    def copies(self) -> Copies:
        """How many ranks have the same part, and which of them this one is."""
        index, count = 0, 1
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "the rank is of the mesh"
        for dimension, placement in enumerate(self.placements):
            if placement.is_replicate():
                size = self.mesh.size(dimension)
                index, count = index * size + coordinate[dimension], count * size
        return Copies(index=index, count=count)


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How it is spread; None for a plain tensor."""
    dtensor = _dtensor()
    if dtensor is None or not isinstance(tensor, dtensor):
        return None
    return Sharding(tensor.device_mesh, tuple(tensor.placements))


def _dtensor() -> Any:
    """The class, where it is known to this process; else nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def rank_path(rank: int, path: str) -> str:
    """The name, in checkpoints, of a tensor that is a rank's own."""
    return f"{rank_name(rank)}/{path}"


class Naming:
    """What a rank puts into checkpoints of states that seldom differ in more than their values."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._seen: list[tuple[object, ...]] = []
        self._order: list[str] = []

    def name(self, tensors: Mapping[str, Tensor], own: Collection[str]) -> list[NamedTensor]:
        """What this rank puts into a checkpoint; what it owns comes first.

        `own` are those of `tensors` of which each rank has its own.

        Raises:
            TypeError: a tensor has a part that is no rectangle.
        """
        found = _named(tensors, rank=self._rank, world_size=self._world_size, own=own)
        self._order = [path for path, _ in found]
        # Of DTensors more than this would have to be the same.
        is_plain = not any(sharding_of(tensor) for tensor in tensors.values())
        self._seen = _look(tensors, own) if is_plain else []
        return [named for _, named in found]

    def same(self, tensors: Mapping[str, Tensor], own: Collection[str]) -> list[Tensor] | None:
        """These in the order of the last `name`, where all else is as it was there; else None."""
        if not self._seen or self._seen != _look(tensors, own):
            return None
        return [tensors[path] for path in self._order]


def _look(tensors: Mapping[str, Tensor], own: Collection[str]) -> list[tuple[object, ...]]:
    """All that decides what tensors are called, who has them, and how much memory they take."""
    return [
        (path, path in own, type(tensor), tensor.shape, tensor.dtype, tensor.device)
        for path, tensor in tensors.items()
    ]


def _named(
    tensors: Mapping[str, Tensor], *, rank: int, world_size: int, own: Collection[str]
) -> list[tuple[str, NamedTensor]]:
    """What goes into a checkpoint, each behind its path in the state."""
    paths: list[str] = []
    parts: list[tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]] = []
    everyone = Copies(index=rank, count=world_size)
    # Ranks with the same parts share them out among each other. Most are the same on all ranks.
    same: list[int] = []
    shared: dict[tuple[Sharding | None, Copies], list[int]] = {(None, everyone): same}
    is_any_spread = _dtensor() is not None
    for path, tensor in tensors.items():
        sharding = sharding_of(tensor) if is_any_spread else None
        shape = tensor.shape
        if sharding is not None:
            local, copies = _local(tensor, path), sharding.copies
            if not local.numel():
                continue
            _, offsets = sharding.part(shape)
            shared.setdefault((sharding, copies), []).append(len(parts))
            parts.append((path, local, shape, offsets))
        elif path in own:
            parts.append((rank_path(rank, path), tensor, shape, (0,) * len(shape)))
        else:
            same.append(len(parts))
            parts.append((path, tensor, shape, (0,) * len(shape)))
        paths.append(path)
    is_mine = [True] * len(parts)
    for (_, copies), indices in shared.items():
        sizes = tuple(parts[index][1].nbytes for index in indices)
        for index, mine in zip(indices, _owned(sizes, copies), strict=True):
            is_mine[index] = mine
    named = [
        (path, NamedTensor(*part, mine))
        for path, part, mine in zip(paths, parts, is_mine, strict=True)
    ]
    return sorted(named, key=lambda each: each[1].owned, reverse=True)


@lru_cache(maxsize=8)
def _owned(sizes: tuple[int, ...], copies: Copies) -> tuple[bool, ...]:
    """Which of the parts that as many ranks have are this rank's; asked for each save anew."""
    return owned([Held(nbytes=size) for size in sizes], replicas=copies)


def _local(tensor: Any, path: str) -> Tensor:
    """This rank's part of a DTensor."""
    for placement in tensor.placements:
        if not (placement.is_replicate() or type(placement).__name__ == "Shard"):
            raise TypeError(f"{path} is placed as {placement}; allowed: Shard and Replicate")
    local: Tensor = tensor.to_local()
    return local
