"""Brings a state of a script's objects back: from this rank's host memory, or from storage.

What is loaded is known only when it is found: an optimizer that has done no step has no state to
load into. So the text that `tree.flatten` made is read first, then the tensors that it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.core.manifest import Manifest
from checkpoint.core.shards import ShardTable
from checkpoint.errors import CorruptCheckpointError
from checkpoint.restore import restore
from checkpoint.restore.peers import Peers
from checkpoint.restore.restore import Node, SealedStep
from checkpoint.stage.hostcopy import host_bytes
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.slotfile import read_table
from checkpoint.storage.storage import Storage
from outlast.session.objects import Objects
from outlast.session.shards import rank_path
from outlast.session.tree import Flat, tensor_paths

# Of each rank: its text, after the number of its bytes.
TEXT = "outlast.objects"
_LENGTH_BYTES = 8
# The tensor has room for more than the text, so that it seldom becomes another.
_LEAST_BYTES = 4096


def text_tensor(flat: Flat, capacity: int) -> Tensor:
    """The text of a state with what is inline, as a tensor of at least `capacity` bytes."""
    raw = flat.text.encode()
    content = bytearray(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
    content += flat.inline
    size = max(capacity, _LEAST_BYTES)
    while size < len(content):
        size *= 2
    return torch.frombuffer(content.ljust(size, b"\0"), dtype=torch.uint8)


def _text_of(tensor: Tensor) -> tuple[str, bytes]:
    """The text, and what is inline with what fills the tensor."""
    raw = bytes(host_bytes(tensor))
    end = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return raw[_LENGTH_BYTES:end].decode(), raw[end:]


class ObjectsLoader:
    """Loads into the objects of a script."""

    def __init__(self, objects: Objects, *, rank: int, world_size: int) -> None:
        self._objects = objects
        self._rank = rank
        self._world_size = world_size
        self._shardings = objects.shardings()

    def sealed_steps(self, folder: Path) -> list[SealedStep]:
        table = self._table(folder)
        return [] if table is None else restore.sealed_steps(folder, _allocated(table))

    def load_memory(self, folder: Path, sealed: SealedStep) -> dict[str, Any]:
        table = self._table(folder)
        if table is None:
            raise CorruptCheckpointError(sealed.step, f"host memory {folder} has no shard table")
        tensors = _allocated(table)
        extra = restore.load_memory(folder, sealed, tensors)
        parts = {named.name: named for named in tensors}
        self._load(parts, self._rank, sealed.step)
        return extra

    def load_storage(
        self,
        storage: Storage,
        step: int,
        peers: Peers,
        *,
        node: Node | None,
        manifest_of: Callable[[int], Manifest],
    ) -> dict[str, Any]:
        manifest = restore.manifest_for_all(step, peers, manifest_of)
        # With another number of ranks, what is a rank's own comes from one of them.
        source = self._rank % manifest.world_size
        load = partial(
            restore.load_storage,
            storage,
            step,
            peers=peers,
            node=node,
            manifest_of=lambda _: manifest,
            is_whole=False,
        )
        text = self._wanted(manifest, rank_path(source, TEXT), step)
        load([text])
        parts = {text.name: text}
        for path in tensor_paths(*_text_of(text.tensor)):
            own = rank_path(source, path)
            name = own if own in manifest.tensors else path
            parts[name] = self._wanted(manifest, name, step, path)
        extra = load([part for part in parts.values() if part.tensor.numel()])
        self._load(parts, source, step)
        return extra

    def _table(self, folder: Path) -> ShardTable | None:
        table = read_table(folder)
        own = (self._rank, self._world_size)
        return table if table is not None and (table.rank, table.world_size) == own else None

    def _wanted(
        self, manifest: Manifest, name: str, step: int, path: str | None = None
    ) -> NamedTensor:
        """An empty place for this rank's part of a saved tensor."""
        if name not in manifest.tensors:
            raise CorruptCheckpointError(step, f"no rank has saved {name}")
        dtype, shape = manifest.tensors[name]
        sharding = None if path is None else self._shardings(path, tuple(shape))
        local, offsets = (shape, (0,) * len(shape)) if sharding is None else sharding.part(shape)
        return NamedTensor(name, torch.empty(local, dtype=getattr(torch, dtype)), shape, offsets)

    def _load(self, parts: Mapping[str, NamedTensor], source: int, step: int) -> None:
        """Hand the objects their states; `parts` are what was loaded, of the rank `source`."""
        text, inline = _text_of(parts[rank_path(source, TEXT)].tensor)

        def tensor_of(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            part = parts.get(rank_path(source, path)) or parts.get(path)
            sharding = self._shardings(path, shape)
            if part is None:
                part = NamedTensor(path, torch.empty(0, dtype=dtype), shape, (0,) * len(shape))
            if sharding is None:
                return _whole(part, step)
            local, offsets = sharding.part(shape)
            if not math.prod(local):
                return sharding.wrap(torch.empty(local, dtype=dtype), shape)
            if (tuple(part.tensor.shape), tuple(part.offsets)) != (local, offsets):
                raise CorruptCheckpointError(step, f"{path} is sharded otherwise than it was")
            return sharding.wrap(part.tensor, shape)

        self._objects.load(text, inline, tensor_of)


def _whole(part: NamedTensor, step: int) -> Tensor:
    """A tensor that this rank has all of."""
    if tuple(part.tensor.shape) == tuple(part.global_shape):
        return part.tensor
    if not math.prod(part.global_shape):
        return part.tensor.view(part.global_shape)
    raise CorruptCheckpointError(
        step, f"{part.name} was sharded, and nothing says how it is to be now"
    )


def _allocated(table: ShardTable) -> list[NamedTensor]:
    """Places for all that a shard table names."""
    return [
        NamedTensor(
            each.name,
            torch.empty(each.shape, dtype=getattr(torch, each.dtype)),
            each.global_shape,
            each.offsets,
        )
        for each in table.tensors
    ]
