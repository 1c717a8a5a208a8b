"""Brings a saved state back into a rank's tensors: from host memory, or from storage.

Host memory holds what this very rank has saved. From storage all ranks load
together, on whatever layout they are: `core/reading.py` plans which rank reads
which blocks, `readahead.py` reads and verifies them, `redistribute.py` passes them on.

Nothing is unpickled: what is read are JSON records and raw tensor bytes.

What does not belong here: which step to restore, and falling back to an older
one. The trainer decides that, for all ranks together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from checkpoint.core.checked_json import canonical
from checkpoint.core.manifest import Manifest
from checkpoint.core.reading import plan_reading
from checkpoint.core.shards import ShardTensor
from checkpoint.core.tiles import Tiles, Wanted, check_same_model
from checkpoint.errors import (
    CorruptCheckpointError,
    DamagedMemoryError,
    LayoutMismatchError,
    StorageUnavailableError,
)
from checkpoint.restore.peers import Alone, Peers, agree, outcome
from checkpoint.restore.readahead import ReadAhead
from checkpoint.restore.redistribute import Passing, Target
from checkpoint.restore.sharing import Neighbours, Node
from checkpoint.stage import slotfile
from checkpoint.stage.damage import leave_note, refuse
from checkpoint.stage.hostcopy import copy_by_memmove
from checkpoint.stage.payload import NamedTensor, map_tensors
from checkpoint.stage.slot_sums import Verifier, damaged, stored_sums
from checkpoint.stage.slotfile import SlotFile
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.describe import check_description
from outlast.crashpoints import CrashPoint, reach

__all__ = [
    "Alone",
    "CorruptCheckpointError",
    "LayoutMismatchError",
    "Node",
    "Peers",
    "SealedStep",
    "StorageUnavailableError",
    "load_memory",
    "load_storage",
    "manifest_for_all",
    "read_manifest",
    "sealed_steps",
]


# Verified at once, and then copied: passing less between threads costs more than it hides.
_PIECE_BYTES = 4 << 20
# What is said of a checkpoint that is not meant to have state of an optimizer.
WEIGHTS_ONLY = "weights_only"
# How names of that state begin, beside those of weights.
_OPTIMIZER = "optim."


class SealedStep(NamedTuple):
    """A step in host memory, and the attempt that sealed it.

    Ranks must agree on both: the same step of two attempts has the same bits only
    where training is bitwise reproducible.
    """

    step: int
    attempt: int


def sealed_steps(folder: Path, tensors: Sequence[NamedTensor]) -> list[SealedStep]:
    """What host memory holds whole for exactly these tensors, newest first.

    A slot whose header is damaged, or a damaged shard table, is refused and reported.
    """
    _note_damaged_table(folder)
    slots, _ = _matching_slots(folder, tensors)
    sealed = set()
    try:
        for slot in slots:
            facts = slot.read()
            try:
                stored_sums(slot)
            except DamagedMemoryError as error:
                refuse(folder.parent, slot, error)
            else:
                if facts.sealed:
                    sealed.add(SealedStep(facts.step, facts.attempt))
    finally:
        _close(slots)
    return sorted(sealed, reverse=True)


def load_memory(
    folder: Path, sealed: SealedStep, tensors: Sequence[NamedTensor], *, copies: bool = True
) -> dict[str, object]:
    """Copy a sealed step from host memory into `tensors`; returns what was saved as `extra`.

    Without `copies` the tensors stay as they are, for who has this very state in them, and only
    what came besides is looked at.

    Every byte is compared with the slot's checksums. A slot that does not fit is refused for
    good and reported; one that was sealed a moment before the end of its agent has none, and
    is taken as it is.

    Raises:
        CorruptCheckpointError: that attempt has not sealed these tensors at that step, or what
            it has sealed is damaged. The tensors hold anything then.
    """
    slots, places = _matching_slots(folder, tensors)
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
            extra = _extra_of(slot)
            reach(CrashPoint.RESTORE_FROM_MEMORY)
            if copies:
                _copy_out(slot, places, tensors)
        except DamagedMemoryError as error:
            refuse(folder.parent, slot, error)
            raise
        return extra
    finally:
        _close(slots)


def load_storage(
    storage: Storage,
    step: int,
    tensors: Sequence[NamedTensor],
    peers: Peers,
    *,
    node: Node | None = None,
    manifest_of: Callable[[int], Manifest] | None = None,
    is_whole: bool = True,
    weights_only: bool = False,
) -> dict[str, object]:
    """Fill `tensors` from the committed checkpoint of `step`; returns what was saved as `extra`.

    All ranks call it together. They need not be as many as saved it, nor hold the same
    rectangles: each byte that anybody needs is read by one of them and passed on, to ranks of
    its `node` through memory that they share. After an error the tensors hold anything.
    `manifest_of` is asked on rank 0 instead of `read_manifest`: it may have read it before.
    `is_whole`: the ranks together want all that was saved. With `weights_only` the state of the
    optimizer becomes zeros, as before a first step; so it does where weights alone were saved.

    Raises, on every rank alike:
        CorruptCheckpointError: a file is missing, short or does not fit its checksum.
        LayoutMismatchError: the checkpoint is of another model.
        StorageUnavailableError: storage did not answer.
    """
    manifest = manifest_for_all(step, peers, manifest_of or partial(read_manifest, storage))
    if weights_only or WEIGHTS_ONLY in _parse_extra(manifest.parts[0].extra):
        tensors = _without_fresh(tensors)
    tiles = Tiles(manifest, without=_OPTIMIZER if weights_only else None)
    wanted = _wanted_by_all(tensors, peers)
    if weights_only:
        check_same_model(tiles, wanted, is_whole=is_whole)
        # Of the weights it was all, and what else is saved is not read.
        is_whole = False
    units = plan_reading(tiles, wanted, peers.rank, is_whole=is_whole)
    own = [unit for unit in units if unit.reader == peers.rank]
    neighbours = Neighbours.meet(peers, node, own)
    source = ReadAhead(storage, manifest, own, neighbours.pool)
    try:
        own_share = range(len(manifest.parts))[peers.rank :: peers.size]
        agree(peers, step, _check_sizes(source, own_share))
        targets = [Target(named.tensor) for named in tensors]
        reach(CrashPoint.RESTORE_FROM_STORAGE)
        Passing(peers, units, source, neighbours, targets).run(step)
    finally:
        source.close()
        neighbours.close()
    for target in targets:
        target.finish()
    return _extra_for(manifest, peers)


def _without_fresh(tensors: Sequence[NamedTensor]) -> Sequence[NamedTensor]:
    """The weights; the optimizer's state is made what it is before the first step."""
    for named in tensors:
        if named.name.startswith(_OPTIMIZER):
            named.tensor.zero_()
    return [named for named in tensors if not named.name.startswith(_OPTIMIZER)]


def read_manifest(storage: Storage, step: int) -> Manifest:
    """What a committed checkpoint holds; its records and torch's description are verified.

    Raises:
        CorruptCheckpointError: one of them is missing or damaged.
        StorageUnavailableError: storage did not answer.
    """
    _, manifest = storage.read_commit(step)
    check_description(storage, manifest)
    return manifest


def manifest_for_all(step: int, peers: Peers, manifest_of: Callable[[int], Manifest]) -> Manifest:
    """The manifest of a checkpoint on all ranks, read by rank 0 with `manifest_of`.

    Raises, on every rank alike:
        CorruptCheckpointError, StorageUnavailableError: as `read_manifest` does.
    """
    found = outcome(partial(manifest_of, step)) if peers.rank == 0 else None
    agree(peers, step, found if isinstance(found, Exception) else None)
    raw = found.to_json() if isinstance(found, Manifest) else b""
    return Manifest.from_json(peers.from_rank_0(raw))


def _wanted_by_all(tensors: Sequence[NamedTensor], peers: Peers) -> list[list[Wanted]]:
    """What every rank wants; ranks that want the same share one list."""
    texts = peers.gather(canonical([_wanted(named) for named in tensors]))
    known = {raw: _parse_wanted(raw) for raw in dict.fromkeys(texts)}
    return [known[raw] for raw in texts]


def _wanted(named: NamedTensor) -> Wanted:
    return Wanted(
        name=named.name,
        dtype=str(named.tensor.dtype).removeprefix("torch."),
        global_shape=tuple(named.global_shape),
        offsets=tuple(named.offsets),
        shape=tuple(named.tensor.shape),
    )


def _parse_wanted(raw: bytes) -> list[Wanted]:
    return [
        Wanted(name, dtype, tuple(global_shape), tuple(offsets), tuple(shape))
        for name, dtype, global_shape, offsets, shape in json.loads(raw)
    ]


def _check_sizes(source: ReadAhead, parts: Sequence[int]) -> Exception | None:
    """The first thing that is wrong with the files of these parts."""
    for part in parts:
        problem = outcome(partial(source.check_size, part))
        if problem is not None:
            return problem
    return None


def _extra_for(manifest: Manifest, peers: Peers) -> dict[str, object]:
    """What came with the part of this rank, or with the first where the layout is another.

    What a job needs of it is the same in all parts.
    """
    own = (peers.rank, peers.size)
    parts = (part for part in manifest.parts if (part.rank, part.world_size) == own)
    return _parse_extra(next(parts, manifest.parts[0]).extra)


def _matching_slots(
    folder: Path, tensors: Sequence[NamedTensor]
) -> tuple[list[SlotFile], list[ShardTensor]]:
    """The folder's slots that hold exactly these tensors, sealed or not, and where each lies.

    What came from a rank that holds the same state has another order: a rank's own come first.
    """
    table = slotfile.read_table(folder)
    if table is None:
        return [], []
    by_rectangle = {shard.rectangle: shard for shard in table.tensors}
    wanted = [_wanted(named) for named in tensors]
    if len(wanted) != len(by_rectangle) or not all(one in by_rectangle for one in wanted):
        return [], []
    slots = slotfile.open_existing(folder)
    _close([slot for slot in slots if slot.table_digest != table.digest])
    matching = [slot for slot in slots if not slot.is_closed]
    return matching, [by_rectangle[one] for one in wanted]


def _extra_of(slot: SlotFile) -> dict[str, object]:
    try:
        return _parse_extra(slot.extra())
    except ValueError as error:
        raise damaged(slot, str(error)) from error


def _note_damaged_table(folder: Path) -> None:
    """Report a shard table that cannot be read: without it no slot can be."""
    if not slotfile.has_damaged_table(folder):
        return
    slots = slotfile.open_existing(folder)
    newest = max((slot for slot in slots), key=lambda slot: slot.read().step, default=None)
    if newest is not None and newest.read().sealed:
        facts = newest.read()
        leave_note(
            folder.parent,
            DamagedMemoryError(
                rank=newest.rank,
                slot=-1,
                step=facts.step,
                attempt=facts.attempt,
                what=f"{slotfile.TABLE_FILE} is not what was written",
            ),
        )
    _close(slots)
    # Its slots are lost with it; once is enough to say so.
    (folder / slotfile.TABLE_FILE).unlink(missing_ok=True)


def _copy_out(
    slot: SlotFile, places: Sequence[ShardTensor], tensors: Sequence[NamedTensor]
) -> None:
    """Copy a slot into tensors, each after its bytes have been verified.

    A thread verifies the next ones meanwhile: both leave the interpreter to each other, and
    memory that is written for the first time takes longer than that.
    """
    sums = stored_sums(slot)
    if sums is None:
        print(
            f"host memory, slot {slot.index} of rank {slot.rank}: step {slot.read().step} was "
            "sealed, but had no checksums yet; it is restored without them",
            file=sys.stderr,
            flush=True,
        )
    # The views die with this frame: a mapping cannot be closed under them.
    views = map_tensors(slot, places, tensors)
    verifier = Verifier(slot, sums or ())
    pieces = _pieces(places)
    with ThreadPoolExecutor(1, thread_name_prefix="verify") as beside:
        verified = [beside.submit(verifier.through, end) for _, end in pieces if sums is not None]
        for number, (indices, _) in enumerate(pieces):
            if sums is not None:
                verified[number].result()
            into = [tensors[index].tensor for index in indices]
            copy_by_memmove(into, [views[index] for index in indices])
    if sums is not None:
        verifier.through(slot.payload_bytes)


def _pieces(places: Sequence[ShardTensor]) -> list[tuple[list[int], int]]:
    """Which tensors are copied together, in the order of the payload, and where each piece ends."""
    pieces: list[tuple[list[int], int]] = []
    indices: list[int] = []
    nbytes = 0
    for index in sorted(range(len(places)), key=lambda index: places[index].byte_offset):
        indices.append(index)
        nbytes += places[index].nbytes
        if nbytes >= _PIECE_BYTES:
            pieces.append((indices, places[index].byte_offset + places[index].nbytes))
            indices, nbytes = [], 0
    if indices:
        last = places[indices[-1]]
        pieces.append((indices, last.byte_offset + last.nbytes))
    return pieces


def _close(slots: Sequence[SlotFile]) -> None:
    for slot in slots:
        slot.close()


def _parse_extra(text: str | bytes) -> dict[str, object]:
    extra: object = json.loads(text)
    if not isinstance(extra, dict):
        raise ValueError(f"extra is a {type(extra).__name__}, not an object")
    return extra
