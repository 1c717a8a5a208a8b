"""Stage 1: the device's state into host memory, at the price of a memory copy.

Slots are mapped and faulted in when the stager is made; a save is one copy
per tensor into a view of the mapping, a header, and no allocation, collective or
system call but two locks. Everything slow (checksums, storage) happens later, in
the agent. A slot holds all that the rank needs to go on, so that a restart needs
nobody else; what it owns comes first, framed as torch would write it.

Where the copies go on while the device computes (`checkpoint.stage.copy_stream`), `save` returns at
once, a thread seals the slot behind the last copy, and whoever changes a tensor asks for
`hold` first.

Only in-place updates are seen: a save copies what the tensor objects given at
the start hold then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.core.slots import (
    NUM_SLOTS,
    NUM_SLOTS_WITH_REPLICAS,
    ReplicaState,
    UploadState,
    choose_slot,
    newest_replicated,
    newest_sealed,
    stale_slots,
)
from checkpoint.stage import allocation, slotfile
from checkpoint.stage.batches import Batches
from checkpoint.stage.bell import Bell
from checkpoint.stage.copy_stream import Copied, CopyStream, HostCopyStream
from checkpoint.stage.payload import NamedTensor, constants, make_table, map_tensors
from checkpoint.stage.slotfile import Seal, SlotFile
from outlast.clock import node_time_ns
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import RetryableError

# Copied in one call: large enough that its price does not show, small enough that who
# changes a tensor waits for little else.
BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class _Saving:
    """A state on its way into a slot, which is locked."""

    slot: SlotFile
    step: int
    text: bytes
    upload: UploadState
    replica: ReplicaState
    # The end of each batch's copy.
    copies: list[Copied] = field(default_factory=list)
    error: BaseException | None = None


class Stager:
    """Copies a rank's state into rotating slots. Not thread-safe.

    Owned tensors come before the others. `is_replicated` says that the agent sends copies
    to another node, for which there are more slots. `copy_stream` is how tensors are copied.
    What was copied is not sealed where `is_void` then says that it may be nothing.

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
        is_replicated: bool = False,
        copy_stream: CopyStream | None = None,
        is_void: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_void = is_void
        self.is_replicated = is_replicated
        self._copy_stream = copy_stream or HostCopyStream()
        self._rank = rank
        self._attempt = attempt
        sources = [named.tensor for named in tensors]
        self._layouts = [named.layout for named in tensors]
        table = make_table(rank, world_size, tensors)
        self._table = table
        self._folder = folder
        self._slots = allocation.prepare(
            folder,
            table,
            list(constants(table, tensors)),
            num_slots=NUM_SLOTS_WITH_REPLICAS if is_replicated else NUM_SLOTS,
        )
        self._views = [map_tensors(slot, table.tensors, tensors) for slot in self._slots]
        for slot in self._slots:
            self._copy_stream.open(torch.frombuffer(slot.map, dtype=torch.uint8))
        self._bell = Bell(folder)
        self._has_resumed = False
        self._saving: _Saving | None = None
        self._sealer: threading.Thread | None = None
        self._batches = Batches(sources, BATCH_BYTES)

    @property
    def newest_sealed(self) -> int:
        """The newest step that this rank holds; -1 when it holds none."""
        return newest_sealed([slot.read() for slot in self._slots])

    @property
    def upload_busy(self) -> bool:
        """Whether an upload of this rank has not ended; asking for another now would queue it."""
        return any(slot.read().is_pinned for slot in self._slots)

    @property
    def newest_replicated(self) -> int:
        """The newest step of this rank that another node has, too; -1 when there is none."""
        return newest_replicated([slot.read() for slot in self._slots])

    @property
    def replica_busy(self) -> bool:
        """Whether a copy of this rank has not arrived, nor failed."""
        return any(slot.read().is_travelling for slot in self._slots)

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
        if self.is_replicated:
            self._replicate_anew(step)

    def save(
        self,
        step: int,
        extra: dict[str, object],
        *,
        upload: bool,
        common_step: int,
        replicate: bool = False,
        replicated_step: int = -1,
    ) -> bool:
        """Seal the present state as that after `step`; whether there was room for it.

        `replicate` asks for a copy on another node; no other may be on its way then.
        `replicated_step` is the newest of which every rank has one; it is kept, too.
        `common_step` is the newest step known to be sealed by all ranks; its slot is
        never overwritten. There is no room when one slot holds that step and uploads pin
        the others.

        Raises:
            TypeError: `extra` holds what JSON cannot say.
            ValueError: `extra` is longer than a slot has room for.
        """
        text = slotfile.text_of(extra)
        self.finish()
        if not self._has_resumed:
            self.resumed(step - 1)
        if self._is_sealed_already(step, upload):
            return True
        if replicate:
            self._forget_partial_copies(replicated_step)
        slot = self._take(step, common_step, replicated_step, wanted=upload)
        if slot is None:
            return False
        saving = _Saving(
            slot,
            step,
            text,
            UploadState.WANTED if upload else UploadState.NONE,
            ReplicaState.WANTED if replicate else ReplicaState.NONE,
        )
        self._fill(saving)
        if self._copy_stream.is_async:
            self._seal_beside_training(saving)
        else:
            self._seal(saving)
        return True

    def rebind(self, tensors: Sequence[NamedTensor]) -> bool:
        """Save these from now on, which are as those before but for where they lie.

        False where they are not: then nothing has changed.
        """
        if [named.layout for named in tensors] != self._layouts:
            return False
        self.move([named.tensor for named in tensors])
        return True

    def move(self, sources: Sequence[Tensor]) -> None:
        """`rebind` for a caller who knows that each is as the one in its place before."""
        self.finish()
        self._batches.move(sources)

    def order_behind(self) -> None:
        """Let whatever is computed from now on come after the copies of the last save.

        Where nobody asks `wait_before_write`. A GPU waits by itself, and not the host.
        """
        if self._saving is not None:
            for copied in self._saving.copies:
                copied.wait_before_write()

    def want_upload(self, step: int) -> None:
        """Have a step that is sealed, or about to be, go to storage."""
        self.finish()
        self._is_sealed_already(step, wanted=True)

    def wait_before_write(self, tensor: Tensor) -> None:
        """Before `tensor` changes: let that come after the copies of what lies in its memory."""
        saving = self._saving
        if saving is None:
            return
        last = self._batches.last_within(tensor)
        if last >= 0:
            saving.copies[last].wait_before_write()

    def finish(self, timeout_s: float | None = None) -> None:
        """Return once the last save is sealed.

        Raises:
            TimeoutError: it is not, after so long; the slot stays without a seal.
        """
        saving, sealer = self._saving, self._sealer
        if saving is None or sealer is None:
            return
        sealer.join(timeout_s)
        if sealer.is_alive():
            raise TimeoutError(
                f"step {saving.step} is not in host memory after {timeout_s:g} s: "
                "the device does not end its copies"
            )
        self._saving = self._sealer = None
        if saving.error is not None:
            raise saving.error

    def leave(self) -> None:
        """Give the attempt up: nothing of it is on its way any more."""
        with contextlib.suppress(Exception):
            self.finish()

    def rejoin(self, attempt: int, tensors: Sequence[NamedTensor]) -> bool:
        """Go on in another attempt with these tensors, which are as those before.

        False where they are not, or others have replaced the slots: then nothing has changed.
        """
        is_same = [named.layout for named in tensors] == self._layouts
        are_there = bool(self._slots) and all(slot.is_in_place for slot in self._slots)
        if not (is_same and are_there):
            return False
        # A process that finds a damaged slot or table deletes it: a new stager creates it again.
        if not allocation.are_whole(self._folder, self._table, len(self._slots)):
            return False
        self.move([named.tensor for named in tensors])
        self._attempt = attempt
        self._has_resumed = False
        return True

    def close(self) -> None:
        """Unmap the slots; they stay for the next attempt."""
        self.finish()
        self._copy_stream.close()
        self._bell.close()
        self._views.clear()
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _replicate_anew(self, step: int) -> None:
        """Ask for copies of the step resumed from: who kept copies before may be gone."""
        for slot in self._slots:
            facts = slot.read()
            wanted = facts.sealed and facts.step == step
            slot.set_replica(ReplicaState.WANTED if wanted else ReplicaState.NONE)

    def _forget_partial_copies(self, replicated_step: int) -> None:
        """A step that only some ranks could copy is no step to come back to."""
        for slot in self._slots:
            if slot.read().step != replicated_step:
                slot.set_replica(ReplicaState.NONE)

    def _is_sealed_already(self, step: int, wanted: bool) -> bool:
        for slot in self._slots:
            facts = slot.read()
            if facts.sealed and facts.step == step and facts.attempt == self._attempt:
                if wanted and facts.upload in (UploadState.NONE, UploadState.FAILED):
                    slot.set_upload(UploadState.WANTED)
                    self._withdraw_older(step)
                return True
        return False

    def _take(
        self, step: int, common_step: int, replicated_step: int, *, wanted: bool
    ) -> SlotFile | None:
        facts = [slot.read() for slot in self._slots]
        locked: list[int] = []
        while True:
            index = choose_slot(
                facts,
                step=step,
                common_step=common_step,
                upload=wanted,
                replicated_step=replicated_step,
                locked=locked,
            )
            if index is None or self._slots[index].try_lock(exclusive=True):
                return None if index is None else self._slots[index]
            locked.append(index)

    def _fill(self, saving: _Saving) -> None:
        """Copy the state into the slot, which says before that it holds nothing."""
        try:
            reach(CrashPoint.SLOT_CHOSEN)
            saving.slot.invalidate()
            reach(CrashPoint.SLOT_INVALID)
            self._copy(saving)
        except BaseException:
            saving.slot.unlock()
            raise

    def _copy(self, saving: _Saving) -> None:
        self._copy_stream.begin()
        with torch.no_grad():
            views = self._views[saving.slot.index]
            for batch, sources in self._batches:
                saving.copies.append(self._copy_stream.copy(sources, views[batch]))
                reach(CrashPoint.SLOT_HALF_COPIED)

    def _seal_beside_training(self, saving: _Saving) -> None:
        self._saving = saving
        self._sealer = threading.Thread(
            target=self._seal_late, args=(saving,), name="seal", daemon=True
        )
        self._sealer.start()

    def _seal_late(self, saving: _Saving) -> None:
        """The thread behind a save that goes on beside training."""
        try:
            # All of them: that the last one ended well says nothing about those before it. But it
            # is the one to wait for: each time that this thread wakes, training may have to wait.
            for copied in reversed(saving.copies):
                copied.wait()
            if self._is_void():
                raise RetryableError(f"step {saving.step} was given up while it was copied")
            self._seal(saving)
        except BaseException as error:  # noqa: BLE001  # `finish` raises it
            saving.error = error
            saving.slot.unlock()

    def _seal(self, saving: _Saving) -> None:
        """Say that the slot holds the step; all of it is there."""
        try:
            reach(CrashPoint.SLOT_COPIED)
            saving.slot.seal(
                Seal(
                    rank=self._rank,
                    attempt=self._attempt,
                    step=saving.step,
                    table_digest=self._table.digest,
                    sealed_at_ns=node_time_ns(),
                    upload=saving.upload,
                    replica=saving.replica,
                ),
                saving.text,
            )
            reach(CrashPoint.SLOT_SEALED)
        finally:
            saving.slot.unlock()
        # The agent gives it its checksums.
        self._bell.ring()
        if saving.upload is UploadState.WANTED:
            self._withdraw_older(saving.step)

    def _withdraw_older(self, step: int) -> None:
        """Storage has no use for a step that still waits when a newer one is wanted."""
        for slot in self._slots:
            facts = slot.read()
            is_older = facts.sealed and facts.upload is UploadState.WANTED and facts.step < step
            # The lock fails when the uploader has just begun with it.
            if is_older and slot.try_lock(exclusive=True):
                if slot.read().upload is UploadState.WANTED:
                    slot.set_upload(UploadState.NONE)
                    reach(CrashPoint.UPLOAD_WITHDRAWN)
                slot.unlock()
