"""Gives every sealed slot of this node's ranks its checksums, and passes on what was damaged.

Threads in the node agent, without torch, at low priority and without the slots' locks, so that
training never waits. A worker rings when it has sealed a slot (`bell.py`). Of each rank the
newest slot comes first: where steps are faster than this, older ones are overwritten without
having had checksums, and each slot costs one pass over its bytes at most. After a kill nothing
is overwritten any more, so that what a restart finds has its checksums before it is read.

What does not belong here: comparing (`slot_sums.py`, and who reads slots).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.core import names
from checkpoint.core.slots import newest_without
from checkpoint.errors import DamagedMemoryError
from checkpoint.stage.bell import Doorkeeper
from checkpoint.stage.damage import Damage, refuse, take_notes
from checkpoint.stage.rank_folder import WatchedFolder
from checkpoint.stage.slot_sums import ensure_sums, has_sums, made_at_ns
from checkpoint.stage.slotfile import SlotFile
from checkpoint.upload.background import give_way_to_training

logger = logging.getLogger(__name__)

# Without a ring: slots that an earlier agent has left, and notes.
_POLL_S = 0.05
# Of the node's cores, so that many ranks do not wait for each other's gigabytes.
_CORES_PER_THREAD = 8
_RETRY_AFTER_S = 1.0
_JOIN_S = 5.0

OnDamage = Callable[[Damage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCounts:
    """What guards have done, in slots."""

    summed: int = 0
    """Slots that have got their checksums here."""
    overwritten: int = 0
    """Slots that were overwritten in the middle: steps are faster than checksums."""
    damaged: int = 0
    """Slots that were refused because they did not hold what was sealed."""
    nbytes: int = 0
    delay_s: float = 0.0
    """From seals to checksums, all together."""

    def __add__(self, other: GuardCounts) -> GuardCounts:
        return GuardCounts(
            summed=self.summed + other.summed,
            overwritten=self.overwritten + other.overwritten,
            damaged=self.damaged + other.damaged,
            nbytes=self.nbytes + other.nbytes,
            delay_s=self.delay_s + other.delay_s,
        )


class Guard:
    """Guards the slots of one job's ranks on this node.

    `on_damage` is called in one of its threads, once for each slot that was refused.
    """

    def __init__(
        self, job_id: str, memory_dir: Path, ranks: Sequence[int], on_damage: OnDamage
    ) -> None:
        self._job_id = job_id
        self._memory_dir = memory_dir
        self._on_damage = on_damage
        self._stopping = threading.Event()
        self._counts = GuardCounts()
        count = max(1, min(len(ranks), len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(sorted(ranks)[number::count],),
                name=f"checkpoint-guard-{job_id}",
                daemon=True,
            )
            for number in range(count)
        ]

    def start(self) -> None:
        """Begin to watch the slots."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop soon; what was found damaged is reported before."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)
        self._report()

    def counts(self) -> GuardCounts:
        """What was done so far."""
        with self._counting:
            return self._counts

    def _run(self, ranks: Sequence[int]) -> None:
        give_way_to_training()
        paths = [self._memory_dir / names.memory_folder(rank) for rank in ranks]
        folders = [WatchedFolder(path, rank) for path, rank in zip(paths, ranks, strict=True)]
        door = Doorkeeper(paths)
        try:
            while not self._stopping.is_set():
                try:
                    # A slot of each rank in turn, for as long as there is one.
                    while self._sum_round(folders):
                        if self._stopping.is_set():
                            return
                    self._report()
                    door.wait(_POLL_S)
                except Exception:
                    # A thread that dies silently would leave slots without checksums.
                    logger.exception("guard failed: job=%s", self._job_id)
                    self._stopping.wait(_RETRY_AFTER_S)
        finally:
            door.close()
            for folder in folders:
                folder.close()

    def _sum_round(self, folders: Sequence[WatchedFolder]) -> int:
        """How many slots got checksums, one of each rank at most.

        A rank where that fails keeps no other from its own.
        """
        count = 0
        has_failed = False
        for folder in folders:
            try:
                count += self._sum_one(folder)
            except Exception:
                logger.exception("no checksums: job=%s rank=%d", self._job_id, folder.rank)
                has_failed = True
        if has_failed and not count:
            self._stopping.wait(_RETRY_AFTER_S)
        return count

    def _sum_one(self, folder: WatchedFolder) -> bool:
        """Give one slot of a rank its checksums; False when all that are sealed have them."""
        slots = {slot.index: slot for slot in folder.slots()}
        done = {slot.index for slot in slots.values() if has_sums(slot)}
        index = newest_without(done, [slot.read() for slot in slots.values()])
        if index is None:
            return False
        slot = slots[index]
        sealed_at_ns = slot.sealed_at_ns
        try:
            sums = ensure_sums(slot, self._stopping.is_set)
        except DamagedMemoryError:
            self._refuse(slot)
            return True
        if sums is None:
            self._count(GuardCounts(overwritten=1))
        else:
            delay_s = max(0.0, (made_at_ns(slot) - sealed_at_ns) / 1e9)
            self._count(GuardCounts(summed=1, nbytes=slot.payload_bytes, delay_s=delay_s))
        return True

    def _refuse(self, slot: SlotFile) -> None:
        """Refuse a damaged slot, unless somebody is filling it: then it was read too late."""
        if not slot.try_lock(exclusive=False):
            return
        try:
            ensure_sums(slot)
        except DamagedMemoryError as error:
            refuse(self._memory_dir, slot, error)
        finally:
            slot.unlock()

    def _report(self) -> None:
        for damage in take_notes(self._memory_dir):
            logger.error("host memory is damaged: job=%s %s", self._job_id, damage.what)
            self._count(GuardCounts(damaged=1))
            self._on_damage(damage)

    def _count(self, more: GuardCounts) -> None:
        with self._counting:
            self._counts += more
