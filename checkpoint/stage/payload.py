"""What lies in a slot's payload: the tensors of a rank, each at its place, with their frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.core.shards import Rectangle, ShardTable, ShardTensor, lay_out
from checkpoint.stage.slotfile import PAYLOAD_AT, SlotFile
from checkpoint.torch_format.frames import Frame, frame_of


class NamedTensor(NamedTuple):
    """A tensor of this rank, and which rectangle of which global tensor it is.

    Of ranks that hold the same, one owns it: storage gets it from there. A tuple, because a save
    makes one for each tensor anew.
    """

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    owned: bool = True

    @property
    def layout(self) -> tuple[object, ...]:
        """All but where it lies and what it holds."""
        name, tensor, global_shape, offsets, owned = self
        return name, global_shape, offsets, owned, tensor.dtype, tensor.shape, tensor.device


def make_table(rank: int, world_size: int, tensors: Sequence[NamedTensor]) -> ShardTable:
    """Where each of these tensors lies in the payload of a rank."""
    return lay_out(rank, world_size, [_rectangle(named) for named in tensors])


def map_tensors(
    slot: SlotFile, table: Sequence[ShardTensor], tensors: Sequence[NamedTensor]
) -> list[Tensor]:
    """Views of a slot's payload, one for each tensor, of the same type and shape."""
    payload_bytes = max((entry.byte_offset + entry.nbytes for entry in table), default=0)
    if not payload_bytes:
        return [torch.empty_like(named.tensor, device="cpu") for named in tensors]
    payload = torch.frombuffer(slot.map, dtype=torch.uint8, count=payload_bytes, offset=PAYLOAD_AT)
    return [
        payload[entry.byte_offset : entry.byte_offset + entry.nbytes]
        .view(named.tensor.dtype)
        .view(entry.shape)
        for entry, named in zip(table, tensors, strict=True)
    ]


def constants(table: ShardTable, tensors: Sequence[NamedTensor]) -> Iterator[tuple[int, bytes]]:
    """What a payload holds besides tensors, and where."""
    for entry, named in zip(table.tensors, tensors, strict=True):
        frame = _frame(named)
        yield entry.frame_offset, frame.prefix
        yield entry.byte_offset + entry.nbytes, frame.suffix


def _rectangle(named: NamedTensor) -> Rectangle:
    frame = _frame(named)
    return Rectangle(
        name=named.name,
        dtype=str(named.tensor.dtype).removeprefix("torch."),
        global_shape=tuple(named.global_shape),
        offsets=tuple(named.offsets),
        shape=tuple(named.tensor.shape),
        nbytes=named.tensor.numel() * named.tensor.element_size(),
        owned=named.owned,
        prefix_nbytes=len(frame.prefix),
        suffix_nbytes=len(frame.suffix),
    )


def _frame(named: NamedTensor) -> Frame:
    """What lies around a tensor in the payload: nothing where storage never sees it."""
    if not named.owned:
        return Frame(b"", b"")
    return frame_of(named.tensor.dtype, tuple(named.tensor.shape))
