"""Brings a saved state back into a rank's tensors: from host memory, or from storage.

Storage is read once per data-parallel group: one rank reads and verifies block
after block while the block before is broadcast, and the others take what they
are given. Whether that worked is broadcast too, so that nobody waits for a
reader that has given up and all ranks come to the same verdict.

Nothing is unpickled: what is read are JSON records and raw tensor bytes.

What does not belong here: which step to restore, and falling back to an older
one. The trainer decides that, for all ranks together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint import slotfile
from checkpoint.checksums import block_checksum
from checkpoint.core.manifest import Manifest, PartRecord
from checkpoint.core.names import attempt_folder
from checkpoint.core.sealed import canonical
from checkpoint.describe import check_description
from checkpoint.errors import (
    CorruptCheckpointError,
    LayoutMismatchError,
    StorageUnavailableError,
)
from checkpoint.slotfile import SlotFile
from checkpoint.stage import NamedTensor, make_table, map_tensors
from checkpoint.storage import Storage
from outlast.errors import OutlastError

__all__ = [
    "CorruptCheckpointError",
    "LayoutMismatchError",
    "SealedStep",
    "StorageUnavailableError",
    "load_memory",
    "load_storage",
    "sealed_steps",
]


class SealedStep(NamedTuple):
    """A step in host memory, and the attempt that sealed it.

    Ranks must agree on both: the same step of two attempts has the same bits only
    where training is bitwise reproducible.
    """

    step: int
    attempt: int


def sealed_steps(folder: Path, tensors: Sequence[NamedTensor]) -> list[SealedStep]:
    """What host memory holds whole for exactly these tensors, newest first."""
    slots = _matching_slots(folder, tensors)
    try:
        found = [slot.read() for slot in slots]
    finally:
        _close(slots)
    sealed = {SealedStep(facts.step, facts.attempt) for facts in found if facts.sealed}
    return sorted(sealed, reverse=True)


def load_memory(
    folder: Path, sealed: SealedStep, tensors: Sequence[NamedTensor]
) -> dict[str, object]:
    """Copy a sealed step from host memory into `tensors`; returns what was saved as `extra`.

    Raises:
        CorruptCheckpointError: that attempt has not sealed these tensors at that step, or
            `extra` is damaged.
    """
    slots = _matching_slots(folder, tensors)
    try:
        for slot in slots:
            facts = slot.read()
            if facts.sealed and SealedStep(facts.step, facts.attempt) == sealed:
                break
        else:
            raise CorruptCheckpointError(
                sealed.step, f"host memory {folder} has no such step of attempt {sealed.attempt}"
            )
        try:
            extra = _parse_extra(slot.extra())
        except ValueError as error:
            raise CorruptCheckpointError(sealed.step, f"host memory: {error}") from error
        _copy_out(slot, tensors)
        return extra
    finally:
        _close(slots)


def load_storage(
    storage: Storage,
    step: int,
    tensors: Sequence[NamedTensor],
    *,
    is_reader: bool,
    broadcast: Callable[[Tensor], None],
) -> dict[str, object]:
    """Fill `tensors` from the committed checkpoint of `step`; returns what was saved as `extra`.

    All ranks of a data-parallel group call it together, one of them as the reader.
    `broadcast` gives the reader's tensor to all of them, in place. After an error the
    tensors hold anything.

    Raises, on every rank of the group alike:
        CorruptCheckpointError: a file is missing, short or does not fit its checksum.
        LayoutMismatchError: the checkpoint holds other shards than these tensors.
        StorageUnavailableError: storage did not answer.
    """
    device = tensors[0].tensor.device if tensors else torch.device("cpu")
    channel = _Channel(broadcast, device, step)
    source = _Source(storage, step, tensors) if is_reader else None
    plan = json.loads(channel.text(None if source is None else source.plan))
    # Ranks that hold the same may list it in another order: what they own comes first.
    by_place = {(named.name, tuple(named.offsets)): named.tensor for named in tensors}
    for number, part in enumerate(plan["parts"]):
        targets = [_Target(by_place[name, tuple(offsets)], at) for name, offsets, at in part["at"]]
        nbytes, block_bytes = part["nbytes"], part["block_bytes"]
        buffer = torch.empty(min(nbytes, block_bytes), dtype=torch.uint8, device=device)
        blocks = source.blocks(number) if source is not None else None
        try:
            for start in range(0, nbytes, block_bytes):
                block = buffer[: min(block_bytes, nbytes - start)]
                channel.text(None if blocks is None else _into(block, blocks))
                broadcast(block)
                for target in targets:
                    target.take(block, start)
        finally:
            if blocks is not None:
                blocks.close()
        for target in targets:
            target.finish()
    return _parse_extra(plan["extra"])


class _Verdict(IntEnum):
    OK = 0
    CORRUPT = 1
    MISMATCH = 2
    UNAVAILABLE = 3


class _Channel:
    """Says to all ranks of a group what its reader got, or why it got nothing."""

    def __init__(
        self, broadcast: Callable[[Tensor], None], device: torch.device, step: int
    ) -> None:
        self._broadcast = broadcast
        self._device = device
        self._step = step

    def text(self, make: Callable[[], str] | None) -> str:
        """The text that the reader made; raises the reader's error on every rank.

        `make` is None on ranks that do not read.
        """
        verdict, raw = _Verdict.OK, b""
        if make is not None:
            verdict, raw = _attempt(make)
        head = torch.tensor([verdict, len(raw)], dtype=torch.int64, device=self._device)
        self._broadcast(head)
        verdict_number, length = head.tolist()
        body = torch.zeros(length, dtype=torch.uint8, device=self._device)
        if length:
            if make is not None:
                body.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            self._broadcast(body)
        text = bytes(body.tolist()).decode()
        match _Verdict(verdict_number):
            case _Verdict.OK:
                return text
            case _Verdict.CORRUPT:
                raise CorruptCheckpointError(self._step, text)
            case _Verdict.MISMATCH:
                raise LayoutMismatchError(text)
            case _Verdict.UNAVAILABLE:
                raise StorageUnavailableError(text)


def _attempt(make: Callable[[], str]) -> tuple[_Verdict, bytes]:
    try:
        return _Verdict.OK, make().encode()
    except CorruptCheckpointError as error:
        return _Verdict.CORRUPT, error.what.encode()
    except LayoutMismatchError as error:
        return _Verdict.MISMATCH, str(error).encode()
    except (OutlastError, OSError) as error:
        return _Verdict.UNAVAILABLE, str(error).encode()


class _Source:
    """The reader's end: the parts of a checkpoint that hold these tensors."""

    def __init__(self, storage: Storage, step: int, tensors: Sequence[NamedTensor]) -> None:
        self._storage = storage
        self._step = step
        self._wanted = make_table(0, 1, tensors).tensors
        self._folder = ""
        self._parts: list[PartRecord] = []

    def plan(self) -> str:
        """Where each tensor lies in which part, for ranks that read no manifest."""
        commit, manifest = self._storage.read_commit(self._step)
        check_description(self._storage, manifest)
        self._folder = attempt_folder(self._step, commit.attempt)
        lacking = {tensor.rectangle for tensor in self._wanted}
        plans = []
        for part in manifest.parts:
            found = [tensor for tensor in part.tensors if tensor.rectangle in lacking]
            lacking.difference_update(tensor.rectangle for tensor in found)
            if found:
                self._check_size(part)
                self._parts.append(part)
                at = [(tensor.name, tensor.offsets, tensor.byte_offset) for tensor in found]
                plans.append({"at": at, "block_bytes": part.block_bytes, "nbytes": part.nbytes})
        if lacking:
            raise LayoutMismatchError(self._explain(manifest))
        extra = (self._parts or manifest.parts)[0].extra
        return canonical({"extra": extra, "parts": plans}).decode()

    def _check_size(self, part: PartRecord) -> None:
        path = f"{self._folder}/{part.file}"
        try:
            nbytes = self._storage.size(path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(self._step, f"{path} is missing") from error
        if nbytes != part.nbytes:
            raise CorruptCheckpointError(
                self._step, f"{path} has {nbytes} bytes, not {part.nbytes}"
            )

    def blocks(self, number: int) -> Generator[bytes, None, None]:
        """Verified blocks of a part, in order; the next is read while one is used."""
        part = self._parts[number]
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-read") as pool:
            ahead = [pool.submit(self._read, part, index) for index in range(len(part.blocks))[:1]]
            for index in range(len(part.blocks)):
                block = ahead.pop().result()
                if index + 1 < len(part.blocks):
                    ahead.append(pool.submit(self._read, part, index + 1))
                yield block

    def _read(self, part: PartRecord, index: int) -> bytes:
        path = f"{self._folder}/{part.file}"
        start, end = part.block_range(index)
        problem = ""
        # A second read tells a bad transfer from bad bytes.
        for _ in range(2):
            try:
                block = self._storage.read_range(path, start, end)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(self._step, f"{path} is missing") from error
            if len(block) != end - start:
                problem = f"bytes {start} to {end} are not all there"
            elif block_checksum(part.checksum, block) != part.blocks[index]:
                problem = f"bytes {start} to {end} do not fit their checksum"
            else:
                return block
        raise CorruptCheckpointError(self._step, f"{path}: {problem}")

    def _explain(self, manifest: Manifest) -> str:
        known = {tensor.rectangle for part in manifest.parts for tensor in part.tensors}
        lacking = [tensor for tensor in self._wanted if tensor.rectangle not in known]
        example = ""
        if lacking:
            first = lacking[0]
            example = (
                f"; it lacks {len(lacking)} of {len(self._wanted)} tensors, first {first.name} "
                f"{first.dtype} {first.shape} at {first.offsets} of {first.global_shape}"
            )
        return (
            f"checkpoint step {self._step} was saved by {manifest.world_size} ranks under another "
            f"layout or model{example}; resume with the layout that saved it"
        )


class _Target:
    """A tensor being filled from the blocks of a part, which need not end where it does."""

    def __init__(self, tensor: Tensor, at: int) -> None:
        self._tensor = tensor
        with torch.no_grad():
            self._dense = tensor.detach().contiguous()
        self._bytes = self._dense.view(-1).view(torch.uint8)
        self._at = at

    def take(self, block: Tensor, start: int) -> None:
        """Copy what is this tensor's of a block that starts at byte `start` of the part."""
        first = max(self._at, start)
        last = min(self._at + self._bytes.numel(), start + block.numel())
        if first < last:
            self._bytes[first - self._at : last - self._at].copy_(
                block[first - start : last - start]
            )

    def finish(self) -> None:
        """Bring the bytes home where the tensor itself does not lie in one piece."""
        if self._dense.data_ptr() != self._tensor.data_ptr():
            with torch.no_grad():
                self._tensor.copy_(self._dense)


def _into(block: Tensor, blocks: Generator[bytes, None, None]) -> Callable[[], str]:
    def read() -> str:
        data = bytearray(next(blocks))
        block.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return ""

    return read


def _matching_slots(folder: Path, tensors: Sequence[NamedTensor]) -> list[SlotFile]:
    """The folder's slots that hold exactly these tensors, sealed or not."""
    table = slotfile.read_table(folder)
    if table is None or make_table(table.rank, table.world_size, tensors) != table:
        return []
    slots = slotfile.open_existing(folder)
    digest = table.digest
    _close([slot for slot in slots if slot.table_digest != digest])
    return [slot for slot in slots if not slot.is_closed]


def _copy_out(slot: SlotFile, tensors: Sequence[NamedTensor]) -> None:
    # The views die with this frame: a mapping cannot be closed under them.
    table = make_table(0, 1, tensors).tensors
    with torch.no_grad():
        for view, named in zip(map_tensors(slot, table, tensors), tensors, strict=True):
            named.tensor.copy_(view)


def _close(slots: Sequence[SlotFile]) -> None:
    for slot in slots:
        slot.close()


def _parse_extra(text: str | bytes) -> dict[str, object]:
    extra: object = json.loads(text)
    if not isinstance(extra, dict):
        raise ValueError(f"extra is a {type(extra).__name__}, not an object")
    return extra
