"""Checksums of a sealed slot, kept in the slot itself, and what is compared with them.

    word 0   `_WHOLE` once all that follows is there
    word 1   the seal that they are of
    word 2   when they were made, nanoseconds since the epoch
    word 3   how many there are
    word 4   checksum of words 1 to 3 and of the checksums
    word 8   checksums of the payload's blocks, in order

They are made after the seal and without the slot's lock, so that training never waits for
them; what a stager overwrites meanwhile is dropped. They name their seal: those of an older
one are never taken for those of a newer one, however the two writers interleave.

What does not belong here: when they are made (`guarding.py`), and what becomes of a slot that
does not fit (`damage.py`).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence

from checkpoint.checksums import CHECKSUM, block_checksum
from checkpoint.core import names
from checkpoint.core.blocks import blocks_of, num_owned_blocks
from checkpoint.errors import DamagedMemoryError
from checkpoint.stage.slotfile import SUMS_HEADER_WORDS, SlotFile
from outlast.clock import node_time_ns

_WHOLE = int.from_bytes(b"OUTLSUM1", "little")
_STATE, _SEAL, _MADE_AT_NS, _COUNT, _SUM = range(5)
# The threads of an agent: two that sum the same slot must not write at once.
_writing = threading.Lock()


def stored_sums(slot: SlotFile) -> tuple[int, ...] | None:
    """The checksums of what is sealed now; None while there are none.

    Raises:
        DamagedMemoryError: header or checksums are not what was written.
    """
    seal_id = slot.seal_id
    if not seal_id:
        return None
    header_fits = slot.header_fits
    if slot.seal_id != seal_id:
        return None
    if not header_fits:
        raise damaged(slot, "its header is not what was sealed")
    with slot.sums as words:
        if (words[_STATE], words[_SEAL]) != (_WHOLE, seal_id):
            return None
        sums = tuple(words[SUMS_HEADER_WORDS:])
        fits = words[_SUM] == _sum_of(words) and words[_COUNT] == len(sums)
        # Written anew while we looked: then they are of another seal.
        is_same = (words[_STATE], words[_SEAL], slot.seal_id) == (_WHOLE, seal_id, seal_id)
    if not is_same:
        return None
    if not fits:
        raise damaged(slot, "its checksums are not what was written")
    return sums


def has_sums(slot: SlotFile) -> bool:
    """Whether what is sealed now has checksums; they are not looked at."""
    with slot.sums as words:
        return (words[_STATE], words[_SEAL]) == (_WHOLE, slot.seal_id)


def ensure_sums(
    slot: SlotFile, is_stopped: Callable[[], bool] = lambda: False
) -> tuple[int, ...] | None:
    """The checksums of what is sealed now, made if there are none.

    None when the slot was overwritten meanwhile, or holds nothing, or `is_stopped`.

    Raises:
        DamagedMemoryError: header or checksums are not what was written.
    """
    return stored_sums(slot) or _make(slot, is_stopped)


def made_at_ns(slot: SlotFile) -> int:
    """When the checksums of the slot were made, in nanoseconds since the epoch."""
    with slot.sums as words:
        return words[_MADE_AT_NS]


def store_sums(slot: SlotFile, seal_id: int, sums: Sequence[int]) -> None:
    """Keep the checksums of what is sealed as `seal_id`; those of another are replaced."""
    with _writing, slot.sums as words:
        if (words[_STATE], words[_SEAL]) == (_WHOLE, seal_id):
            return
        words[_STATE] = 0
        words[_SEAL], words[_MADE_AT_NS], words[_COUNT] = seal_id, node_time_ns(), len(sums)
        with words[SUMS_HEADER_WORDS:] as room:
            room[:] = memoryview(array("Q", sums))
        words[_SUM] = _sum_of(words)
        words[_STATE] = _WHOLE


def compare(slot: SlotFile, sums: Sequence[int], first: int, found: Sequence[int]) -> None:
    """Raise DamagedMemoryError unless blocks of the payload, from `first` on, have these sums."""
    for index, number in enumerate(found, first):
        if number != sums[index]:
            start, end = blocks_of(slot.payload_bytes, slot.owned_bytes)[index]
            raise damaged(slot, f"bytes {start} to {end} of its payload do not fit their checksum")


def owned_sums(slot: SlotFile, sums: Sequence[int]) -> tuple[int, ...]:
    """Of all checksums, those of what goes to storage."""
    return tuple(sums[: num_owned_blocks(slot.owned_bytes)])


class Verifier:
    """Compares a slot's payload with its checksums, in order, as it is read.

    What has just been verified lies in the processor's cache for whoever copies it next.
    """

    def __init__(self, slot: SlotFile, sums: Sequence[int]) -> None:
        self._slot = slot
        self._sums = sums
        self._blocks = blocks_of(slot.payload_bytes, slot.owned_bytes)
        self._next = 0

    def through(self, end: int) -> None:
        """Verify every block that begins before byte `end` of the payload.

        Raises:
            DamagedMemoryError: one does not fit its checksum.
        """
        with self._slot.payload as payload:
            while self._next < len(self._blocks) and self._blocks[self._next][0] < end:
                first, last = self._blocks[self._next]
                with payload[first:last] as block:
                    found = block_checksum(CHECKSUM, block)
                compare(self._slot, self._sums, self._next, (found,))
                self._next += 1


def verify(slot: SlotFile, sums: Sequence[int]) -> None:
    """Compare all of a slot's payload with its checksums.

    Raises:
        DamagedMemoryError: a block does not fit.
    """
    Verifier(slot, sums).through(slot.payload_bytes)


def damaged(slot: SlotFile, what: str) -> DamagedMemoryError:
    """The error that says what is wrong with a slot."""
    facts = slot.read()
    # The header may be what is damaged.
    rank = names.parse_memory_folder(slot.path.parent.name)
    return DamagedMemoryError(
        rank=slot.rank if rank is None else rank,
        slot=slot.index,
        step=facts.step,
        attempt=facts.attempt,
        what=what,
    )


def _make(slot: SlotFile, is_stopped: Callable[[], bool]) -> tuple[int, ...] | None:
    seal_id = slot.seal_id
    if not seal_id:
        return None
    sums = []
    with slot.payload as payload:
        for start, end in blocks_of(slot.payload_bytes, slot.owned_bytes):
            with payload[start:end] as block:
                sums.append(block_checksum(CHECKSUM, block))
            if is_stopped() or slot.seal_id != seal_id:
                return None
    store_sums(slot, seal_id, sums)
    # Those of a slot that was overwritten since are nobody's: they name another seal.
    return tuple(sums) if slot.seal_id == seal_id else None


def _sum_of(words: memoryview) -> int:
    with words[_SEAL:_SUM] as head, words[SUMS_HEADER_WORDS:] as sums:
        return block_checksum(CHECKSUM, head.tobytes() + sums.tobytes())
