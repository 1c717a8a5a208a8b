"""One rank's share of a checkpoint on its way from a slot to storage: payload, then record.

What does not belong here: when it is sent, and what becomes of a failure (`uploader.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkpoint.checksums import CHECKSUM, block_checksums
from checkpoint.core import names
from checkpoint.core.checked_json import RecordError
from checkpoint.core.manifest import BLOCK_BYTES, PartRecord
from checkpoint.core.shards import ShardTable
from checkpoint.core.slots import Slot, UploadState, next_upload
from checkpoint.errors import CorruptCheckpointError
from checkpoint.stage import slotfile
from checkpoint.stage.rank_folder import WatchedFolder
from checkpoint.stage.slot_sums import compare, damaged, ensure_sums, owned_sums
from checkpoint.stage.slotfile import SlotFile
from checkpoint.storage.storage import Storage
from checkpoint.upload.transfer import OnPart
from outlast.crashpoints import CrashPoint, reach

# `Transfer.send` with its deadline.
Send = Callable[[str, memoryview | bytes, OnPart], None]


class Part:
    """One rank's share of a checkpoint on its way to storage."""

    def __init__(self, folder: RankFolder, slot: SlotFile, facts: Slot, *, num_parts: int) -> None:
        self.folder = folder
        self.slot = slot
        self.facts = facts
        self._num_parts = num_parts
        at = names.attempt_folder(facts.step, facts.attempt)
        self._payload_path = f"{at}/{names.payload_name(folder.rank)}"
        self._record_path = f"{at}/{names.PARTS}/{names.part_name(folder.rank)}"

    def write(self, send: Send) -> tuple[PartRecord, bytes]:
        """Write payload, then record: a record says that all of the payload is there.

        What is sent is compared with the slot's checksums, part by part, before it goes.
        Returns the record, and its bytes.

        Raises:
            CorruptCheckpointError: host memory does not hold what its header says.
        """
        sums = self._sums()

        def compared(start: int, chunk: memoryview) -> None:
            found = tuple(block_checksums(CHECKSUM, chunk, BLOCK_BYTES))
            compare(self.slot, sums, start // BLOCK_BYTES, found)

        with self.slot.owned as payload:
            send(self._payload_path, payload, compared)
        reach(CrashPoint.PAYLOAD_STORED)
        record = self._record(owned_sums(self.slot, sums))
        raw = record.to_json()
        send(self._record_path, raw, _ignore)
        reach(CrashPoint.RECORD_STORED)
        return record, raw

    def is_stored(self, storage: Storage) -> bool:
        """Whether an uploader that died had sent it all: its record is there, and of these bytes.

        Raises:
            CorruptCheckpointError: host memory does not hold what its header says.
        """
        # Nobody had begun with it.
        if self.facts.upload is not UploadState.BUSY:
            return False
        try:
            found = PartRecord.from_json(storage.read_bytes(self._record_path))
            nbytes = storage.size(self._payload_path)
        except (FileNotFoundError, RecordError):
            return False
        # The record has the sums of what was read and compared when it was sent.
        return found == self._record(owned_sums(self.slot, self._sums())) and nbytes == found.nbytes

    def _sums(self) -> tuple[int, ...]:
        """The slot's checksums, made now if the guard has not come to it; the slot is locked."""
        sums = ensure_sums(self.slot)
        assert sums is not None, "nobody overwrites a slot that is locked"
        return sums

    def delete(self, storage: Storage) -> None:
        """Take back what was written, unless the checkpoint exists by now."""
        if self.facts.step not in storage.committed_steps():
            storage.delete_file(self._record_path)
            storage.delete_file(self._payload_path)

    def _record(self, blocks: tuple[int, ...]) -> PartRecord:
        table, extra = self._read()
        return PartRecord(
            step=self.facts.step,
            attempt=self.facts.attempt,
            rank=self.folder.rank,
            world_size=table.world_size,
            num_parts=self._num_parts,
            file=names.payload_name(self.folder.rank),
            nbytes=table.owned_bytes,
            block_bytes=BLOCK_BYTES,
            checksum=CHECKSUM,
            blocks=blocks,
            tensors=table.owned,
            extra=extra,
        )

    def _read(self) -> tuple[ShardTable, str]:
        table = self.folder.table(self.slot.table_digest)
        if table is None:
            raise CorruptCheckpointError(
                self.facts.step, f"{self.slot.path}: {slotfile.TABLE_FILE} is of other tensors"
            )
        try:
            return table, self.slot.extra().decode()
        except ValueError as error:
            raise damaged(self.slot, str(error)) from error


class RankFolder(WatchedFolder):
    """A rank's host memory, of which the uploader wants what is to be uploaded."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, rank)
        self._table: ShardTable | None = None
        self._table_digest = 0

    def table(self, digest: int) -> ShardTable | None:
        """What lies in slots of this digest, read once for each layout; None when unknown."""
        if self._table is None or self._table_digest != digest:
            self._table = slotfile.read_table(self.path)
            self._table_digest = 0 if self._table is None else self._table.digest
        return self._table if self._table_digest == digest else None

    def next_upload(self) -> SlotFile | None:
        """The slot to upload next, if any is wanted."""
        slots = {slot.index: slot for slot in self.slots()}
        chosen = next_upload([slot.read() for slot in slots.values()])
        return None if chosen is None else slots[chosen]


def _ignore(start: int, chunk: memoryview) -> None:
    """A record has no checksums of blocks: it guards itself."""
