"""Which host-memory slot to write next, and which to upload.

A rank rotates through its slots so that at any moment, a kill in the middle of
a copy included, one slot holds the newest step that *all* ranks have sealed.
With one slot for that common step and one pinned by an upload, the third is
free for the next copy.

Where state is copied to other nodes there are two more: for the newest step of which every
rank has a copy elsewhere, and for the one that is on its way. All ranks keep the former,
as a lost node can be brought back to that step only.

What does not belong here: the file format (`checkpoint/stage/slotfile.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

NUM_SLOTS = 3
NUM_SLOTS_WITH_REPLICAS = NUM_SLOTS + 2
# Of each rank whose copies a node keeps: one that is whole, and one that arrives.
NUM_HELD_SLOTS = 2


class UploadState(IntEnum):
    """What storage should get, or has got, of a slot."""

    NONE = 0
    WANTED = 1
    BUSY = 2
    DONE = 3
    FAILED = 4


class ReplicaState(IntEnum):
    """What the node that keeps copies of this rank should get, or has got, of a slot."""

    NONE = 0
    WANTED = 1
    BUSY = 2
    DONE = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a slot's header says. Step and upload mean something only when sealed."""

    index: int
    sealed: bool
    step: int
    attempt: int
    upload: UploadState
    replica: ReplicaState = ReplicaState.NONE

    @property
    def is_pinned(self) -> bool:
        """Whether an upload still needs the bytes."""
        return self.sealed and self.upload in (UploadState.WANTED, UploadState.BUSY)

    @property
    def is_travelling(self) -> bool:
        """Whether another node has yet to get the bytes."""
        return self.sealed and self.replica in (ReplicaState.WANTED, ReplicaState.BUSY)


def newest_sealed(slots: Sequence[Slot]) -> int:
    """The newest step that is whole; -1 when none is."""
    return max((slot.step for slot in slots if slot.sealed), default=-1)


def newest_replicated(slots: Sequence[Slot]) -> int:
    """The newest step that another node has, too; -1 when there is none."""
    done = (slot.step for slot in slots if slot.sealed and slot.replica is ReplicaState.DONE)
    return max(done, default=-1)


def common_step(*, lowest: int, highest: int, known: int) -> int:
    """The newest step that all ranks hold for certain, from the newest that each has sealed.

    `lowest` and `highest` are over all ranks, `known` is what this was before. Where ranks
    differ, one had no free slot for a step or more. The lowest of the newest is then a
    step that others may have overwritten long ago, so what was known before stays.
    """
    return lowest if lowest == highest else known


def choose_slot(
    slots: Sequence[Slot],
    *,
    step: int,
    common_step: int,
    upload: bool,
    replicated_step: int = -1,
    locked: Collection[int] = (),
) -> int | None:
    """Index of the slot to overwrite with `step`; None when every slot is still needed.

    Never the slot of `common_step` or `replicated_step`, nor one in `locked` (somebody
    reads it), nor one that an upload or a copy has begun or waits for. One that waits for
    its upload may go when `upload` says that this step is to be uploaded in its place.
    """
    candidates = [
        slot
        for slot in slots
        if slot.index not in locked
        and not slot.is_travelling
        and not (slot.sealed and slot.step in (common_step, replicated_step))
    ]
    free = [slot for slot in candidates if not slot.is_pinned]
    if not free and upload:
        free = [
            slot for slot in candidates if slot.upload is UploadState.WANTED and slot.step < step
        ]
    best = min(free, key=lambda slot: _worth(slot, step), default=None)
    return None if best is None else best.index


def choose_held(slots: Sequence[Slot], *, needed: Collection[tuple[int, int]]) -> int:
    """Index of the copy to overwrite, on the node that keeps copies.

    `needed` are attempt and step of copies that every rank has: they go last. The others
    are of an abandoned past, or of a step that some rank could not bring to its holder.
    """

    def worth(slot: Slot) -> tuple[int, int, int]:
        if not slot.sealed:
            return (0, 0, slot.index)
        return (1 + ((slot.attempt, slot.step) in needed), slot.attempt, slot.step)

    return min(slots, key=worth).index


def stale_slots(slots: Sequence[Slot], *, resumed_step: int) -> list[int]:
    """Slots newer than the step that training resumed from: states of an abandoned past.

    Another rank may lack them, and steps trained again need not give the same bits
    where the spec allows that; two attempts must never be mixed in one state.
    """
    return [slot.index for slot in slots if slot.sealed and slot.step > resumed_step]


def next_upload(slots: Sequence[Slot]) -> int | None:
    """Index of the slot to upload: the newest that is wanted, or was left half uploaded."""
    pinned = [slot for slot in slots if slot.is_pinned]
    best = max(pinned, key=lambda slot: (slot.attempt, slot.step), default=None)
    return None if best is None else best.index


def newest_without(done: Collection[int], slots: Sequence[Slot]) -> int | None:
    """Index of the newest sealed slot that is not among `done`; None when all are."""
    left = [slot for slot in slots if slot.sealed and slot.index not in done]
    best = max(left, key=lambda slot: (slot.attempt, slot.step), default=None)
    return None if best is None else best.index


def _worth(slot: Slot, step: int) -> tuple[int, int, int]:
    # Torn slots go first, then those of this step or later, which an earlier attempt left,
    # then the oldest.
    if not slot.sealed:
        return (0, 0, slot.index)
    if slot.step >= step:
        return (1, -slot.step, slot.index)
    return (2, slot.step, slot.index)
