"""Which part of which whole tensor a rank has: of a DTensor its shard, of any other all of it.

A plain tensor of a model or an optimizer is the same on all ranks, as under DDP; torch's own
distributed checkpoints hold it so, too. One of anything else (the state of a loader, of a random
generator) is each rank's own.

torch's DTensor takes 0.2 s to import: only where a script has done so can it have one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

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
    if _is_dtensor(tensor):
        return Sharding(tensor.device_mesh, tuple(tensor.placements))
    return None


def rank_path(rank: int, path: str) -> str:
    """The name, in checkpoints, of a tensor that is a rank's own."""
    return f"{rank_name(rank)}/{path}"


def named_tensors(
    tensors: Mapping[str, Tensor], *, rank: int, world_size: int, is_own: Mapping[str, bool]
) -> list[NamedTensor]:
    """What this rank puts into a checkpoint; what it owns comes first.

    `is_own` says of which paths' tensors each rank has its own.

    Raises:
        TypeError: a tensor has a part that is no rectangle.
    """
    found: list[NamedTensor] = []
    # Ranks with the same parts share them out among each other.
    shared: dict[tuple[Sharding | None, Copies], list[int]] = {}
    for path, tensor in tensors.items():
        sharding = sharding_of(tensor)
        copies = Copies(index=rank, count=world_size) if sharding is None else sharding.copies
        if sharding is None and is_own[path]:
            copies = Copies()
        local = _local(tensor, path)
        if sharding is not None and not local.numel():
            continue
        shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if sharding is not None:
            _, offsets = sharding.part(shape)
        shared.setdefault((sharding, copies), []).append(len(found))
        name = rank_path(rank, path) if sharding is None and is_own[path] else path
        found.append(NamedTensor(name, local, shape, offsets))
    for (_, copies), indices in shared.items():
        held = [Held(nbytes=found[index].tensor.nbytes) for index in indices]
        for index, mine in zip(indices, owned(held, replicas=copies), strict=True):
            named = found[index]
            found[index] = NamedTensor(
                named.name, named.tensor, named.global_shape, named.offsets, owned=mine
            )
    return sorted(found, key=lambda named: not named.owned)


def _local(tensor: Tensor, path: str) -> Tensor:
    if not _is_dtensor(tensor):
        return tensor
    for placement in tensor.placements:
        if not (placement.is_replicate() or type(placement).__name__ == "Shard"):
            raise TypeError(f"{path} is placed as {placement}; allowed: Shard and Replicate")
    return tensor.to_local()


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
