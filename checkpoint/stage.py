"""Stage 1: the device's state into host memory, at the price of a memory copy.

Slots are mapped and faulted in when the stager is made; a save is one `copy_`
per tensor into a view of the mapping, a header, and no allocation, collective or
system call but two locks. Everything slow (checksums, storage) happens later, in
the agent. A slot holds all that the rank needs to go on, so that a restart needs
nobody else; what it owns comes first, framed as torch would write it.

Only in-place updates are seen: a save copies what the tensor objects given at
the start hold then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import slotfile
from checkpoint.core.sealed import canonical
from checkpoint.core.shards import Rectangle, ShardTable, ShardTensor, lay_out
from checkpoint.core.slots import UploadState, choose_slot, newest_sealed, stale_slots
from checkpoint.frames import Frame, frame_of
from checkpoint.slotfile import Seal, SlotFile


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of this rank, and which rectangle of which global tensor it is.

    Of ranks that hold the same, one owns it: storage gets it from there.
    """

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    owned: bool = True


class Stager:
    """Copies a rank's state into rotating slots. Not thread-safe.

    Owned tensors come before the others.

    Raises:
        FatalError: the slots do not fit into host memory.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        attempt: int,
        world_size: int,
        tensors: Sequence[NamedTensor],
    ) -> None:
        self._rank = rank
        self._attempt = attempt
        self._tensors = tuple(tensors)
        table = make_table(rank, world_size, tensors)
        self._digest = table.digest
        self._slots = slotfile.prepare(folder, table, list(_constants(table, tensors)))
        self._views = [map_tensors(slot, table.tensors, tensors) for slot in self._slots]
        self._has_resumed = False

    @property
    def newest_sealed(self) -> int:
        """The newest step that this rank holds; -1 when it holds none."""
        return newest_sealed([slot.read() for slot in self._slots])

    @property
    def upload_busy(self) -> bool:
        """Whether an upload of this rank has not ended; asking for another now would queue it."""
        return any(slot.read().is_pinned for slot in self._slots)

    def resumed(self, step: int) -> None:
        """Drop what is newer than the step that training goes on from.

        Call it once the state is restored (0: from the beginning). What an abandoned
        attempt sealed beyond that step must not be taken for a state of this one. The
        first save does it for a caller who has not.
        """
        self._has_resumed = True
        for index in stale_slots([slot.read() for slot in self._slots], resumed_step=step):
            # Bytes that an uploader is reading stay; only the name for them goes.
            self._slots[index].invalidate()

    def save(self, step: int, extra: dict[str, object], *, upload: bool, common_step: int) -> bool:
        """Seal the present state as that after `step`; whether there was room for it.

        `common_step` is the newest step known to be sealed by all ranks; its slot is
        never overwritten. There is no room when one slot holds that step and uploads pin
        the others.

        Raises:
            TypeError: `extra` holds what JSON cannot say.
            ValueError: `extra` is longer than a slot has room for.
        """
        text = canonical(extra)
        if len(text) > slotfile.EXTRA_BYTES:
            raise ValueError(f"extra: {len(text)} bytes of JSON; at most {slotfile.EXTRA_BYTES}")
        if not self._has_resumed:
            self.resumed(step - 1)
        if self._is_sealed_already(step, upload):
            return True
        slot = self._take(step, common_step, upload)
        if slot is None:
            return False
        try:
            slot.invalidate()
            self._copy_into(slot)
            slot.seal(
                Seal(
                    rank=self._rank,
                    attempt=self._attempt,
                    step=step,
                    table_digest=self._digest,
                    sealed_at_ns=time.time_ns(),
                    upload=UploadState.WANTED if upload else UploadState.NONE,
                ),
                text,
            )
        finally:
            slot.unlock()
        if upload:
            self._withdraw_older(step)
        return True

    def close(self) -> None:
        """Unmap the slots; they stay for the next attempt."""
        self._views.clear()
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _is_sealed_already(self, step: int, wanted: bool) -> bool:
        for slot in self._slots:
            facts = slot.read()
            if facts.sealed and facts.step == step and facts.attempt == self._attempt:
                if wanted and facts.upload in (UploadState.NONE, UploadState.FAILED):
                    slot.set_upload(UploadState.WANTED)
                    self._withdraw_older(step)
                return True
        return False

    def _take(self, step: int, common_step: int, wanted: bool) -> SlotFile | None:
        facts = [slot.read() for slot in self._slots]
        locked: list[int] = []
        while True:
            index = choose_slot(
                facts, step=step, common_step=common_step, upload=wanted, locked=locked
            )
            if index is None or self._slots[index].try_lock(exclusive=True):
                return None if index is None else self._slots[index]
            locked.append(index)

    def _copy_into(self, slot: SlotFile) -> None:
        on_device = False
        with torch.no_grad():
            for view, named in zip(self._views[slot.index], self._tensors, strict=True):
                view.copy_(named.tensor, non_blocking=True)
                on_device = on_device or named.tensor.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()

    def _withdraw_older(self, step: int) -> None:
        """Storage has no use for a step that still waits when a newer one is wanted."""
        for slot in self._slots:
            facts = slot.read()
            is_older = facts.sealed and facts.upload is UploadState.WANTED and facts.step < step
            # The lock fails when the uploader has just begun with it.
            if is_older and slot.try_lock(exclusive=True):
                if slot.read().upload is UploadState.WANTED:
                    slot.set_upload(UploadState.NONE)
                slot.unlock()


def make_table(rank: int, world_size: int, tensors: Sequence[NamedTensor]) -> ShardTable:
    """Where each of these tensors lies in the payload of a rank."""
    return lay_out(rank, world_size, [_rectangle(named) for named in tensors])


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


def _constants(table: ShardTable, tensors: Sequence[NamedTensor]) -> Iterator[tuple[int, bytes]]:
    """What a payload holds besides tensors, and where."""
    for entry, named in zip(table.tensors, tensors, strict=True):
        frame = _frame(named)
        yield entry.frame_offset, frame.prefix
        yield entry.byte_offset + entry.nbytes, frame.suffix


def map_tensors(
    slot: SlotFile, table: Sequence[ShardTensor], tensors: Sequence[NamedTensor]
) -> list[Tensor]:
    """Views of a slot's payload, one for each tensor, of the same type and shape."""
    payload_bytes = max((entry.byte_offset + entry.nbytes for entry in table), default=0)
    if not payload_bytes:
        return [torch.empty_like(named.tensor, device="cpu") for named in tensors]
    payload = torch.frombuffer(
        slot.map, dtype=torch.uint8, count=payload_bytes, offset=slotfile.PAYLOAD_AT
    )
    return [
        payload[entry.byte_offset : entry.byte_offset + entry.nbytes]
        .view(named.tensor.dtype)
        .view(entry.shape)
        for entry, named in zip(table, tensors, strict=True)
    ]
