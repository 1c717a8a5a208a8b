"""The slots of a rank are made before it saves anything: allocated, mapped, faulted in.

A slot is there whole or not at all, under its name, whenever the process is killed. That
there is too little room must stop a job before it trains.

What does not belong here: what is in a slot (`slotfile.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from checkpoint.core.shards import ShardTable
from checkpoint.core.slots import NUM_SLOTS, NUM_SLOTS_WITH_REPLICAS
from checkpoint.memory import free_bytes, most_host_memory_bytes
from checkpoint.stage.slotfile import (
    PAYLOAD_AT,
    TABLE_FILE,
    SlotFile,
    read_table,
    slot_bytes,
    slot_path,
    write_first_header,
)
from outlast import private
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import FatalError, MisfitError, OccupiedError


def prepare(
    folder: Path,
    table: ShardTable,
    constants: Sequence[tuple[int, bytes]] = (),
    *,
    num_slots: int = NUM_SLOTS,
) -> list[SlotFile]:
    """All slots of a rank, allocated, mapped and faulted in.

    `constants` are what no save changes, with their places in the payload: frames.
    Slots that an earlier attempt sealed under the same table stay as they are.
    Pages are taken now: the first copy into untouched tmpfs is 10 to 40 times slower
    than the later ones, and a full tmpfs must stop the job before it trains.

    Raises:
        MisfitError: the file system is too small for them.
        OccupiedError: it has no room for them now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".new-*"):
        leftover.unlink(missing_ok=True)
    if read_table(folder) != table:
        # Unlinking leaves the bytes to an uploader that still has them mapped.
        for index in range(NUM_SLOTS_WITH_REPLICAS):
            slot_path(folder, index).unlink(missing_ok=True)
        _write_table(folder, table)
    for index in range(num_slots, NUM_SLOTS_WITH_REPLICAS):
        slot_path(folder, index).unlink(missing_ok=True)
    file_bytes = slot_bytes(table.payload_bytes, table.owned_bytes)
    missing = [index for index in range(num_slots) if not _fits(folder, index, file_bytes)]
    _create(folder, missing, table, constants)
    return [SlotFile(slot_path(folder, index), index, populate=True) for index in range(num_slots)]


def are_whole(folder: Path, table: ShardTable, num_slots: int) -> bool:
    """Whether the slots of a rank, which were prepared once, would be taken as they are."""
    file_bytes = slot_bytes(table.payload_bytes, table.owned_bytes)
    return read_table(folder) == table and all(
        _fits(folder, index, file_bytes) for index in range(num_slots)
    )


def _fits(folder: Path, index: int, file_bytes: int) -> bool:
    path = slot_path(folder, index)
    try:
        if path.stat().st_size != file_bytes:
            return False
        SlotFile(path, index).close()
    except (FileNotFoundError, ValueError):
        return False
    return True


def _create(
    folder: Path, missing: list[int], table: ShardTable, constants: Sequence[tuple[int, bytes]]
) -> None:
    file_bytes = slot_bytes(table.payload_bytes, table.owned_bytes)
    needed = len(missing) * file_bytes
    free = free_bytes(folder)
    if needed > free:
        raise _no_room(folder, table, len(missing), needed, free)
    made: list[Path] = []
    try:
        for index in missing:
            # A slot appears under its name only when it is allocated to the last page:
            # writing to a hole that cannot be filled kills a process with SIGBUS.
            new = folder / f".new-{index}"
            made.append(new)
            _allocate(new, file_bytes, table, constants)
        reach(CrashPoint.SLOTS_ALLOCATED)
        for index, new in zip(missing, made, strict=True):
            new.rename(slot_path(folder, index))
        reach(CrashPoint.SLOTS_MADE)
    except OSError as error:
        for new in made:
            new.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise
        raise _no_room(folder, table, len(missing), needed, free_bytes(folder)) from error


def _no_room(folder: Path, table: ShardTable, slots: int, needed: int, free: int) -> FatalError:
    total = most_host_memory_bytes(folder)
    kind = MisfitError if needed > total else OccupiedError
    return kind(
        f"host memory {folder}: {slots} checkpoint slots of rank {table.rank} need {needed} bytes "
        f"and {free} bytes are free of {total}; enlarge this tmpfs or give the node fewer ranks"
    )


def _allocate(
    path: Path, file_bytes: int, table: ShardTable, constants: Sequence[tuple[int, bytes]]
) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(handle, 0, file_bytes)
        for place, constant in constants:
            os.pwrite(handle, constant, PAYLOAD_AT + place)
        write_first_header(handle, table)
    finally:
        os.close(handle)


def _write_table(folder: Path, table: ShardTable) -> None:
    new = folder / f".new-{TABLE_FILE}"
    private.write_bytes(new, table.to_json())
    new.rename(folder / TABLE_FILE)
