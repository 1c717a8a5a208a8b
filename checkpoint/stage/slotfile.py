"""A slot of host memory: a plain file on tmpfs that a worker fills and an agent reads.

    0        header: 64-bit words, each stored and loaded whole
    4 KiB    `extra`, JSON text
    64 KiB   payload: the rank's tensors, placed by the shard table in `shards.json`;
             what the rank owns comes first and is, to the byte, what goes to storage
    then     checksums of the payload's blocks (`slot_sums.py`), written after the seal

The commit word is cleared before anything else of a slot changes and stored
after everything else, so that a process killed at any instruction leaves a slot
that is either whole or known to be torn. A plain file outlives whoever mapped it
(`multiprocessing.shared_memory` does not: its resource tracker unlinks a segment
when an attached process is killed).

Who may do what is settled by flock, which dies with its holder: an uploader
reads under a shared lock, a stager overwrites under an exclusive one. The upload
word is written by the stager when it seals, and by the uploader under its lock; the
replica word likewise, by the stager and by whoever sends copies to another node.

What does not belong here: torch, and the choice of slots (`core/slots.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from checkpoint.checksums import CHECKSUM, block_checksum
from checkpoint.core.blocks import num_blocks
from checkpoint.core.checked_json import RecordError, canonical
from checkpoint.core.shards import ALIGNMENT_BYTES, ShardTable
from checkpoint.core.slots import NUM_SLOTS_WITH_REPLICAS, ReplicaState, Slot, UploadState
from checkpoint.stage.fence import fence
from outlast.crashpoints import CrashPoint, reach

HEADER_BYTES = 4096
EXTRA_BYTES = 60 << 10
PAYLOAD_AT = HEADER_BYTES + EXTRA_BYTES
TABLE_FILE = "shards.json"
# Before the checksums themselves, see `slot_sums`.
SUMS_HEADER_WORDS = 8

_MAGIC = int.from_bytes(b"OUTLSLT2", "little")
# Index of each 64-bit word of the header. The commit word has a cache line of its own.
(
    _MAGIC_WORD,
    _RANK,
    _ATTEMPT,
    _STEP,
    _PAYLOAD_BYTES,
    _EXTRA_SIZE,
    _EXTRA_CRC,
    _TABLE_DIGEST,
    _SEALED_AT_NS,
    _OWNED_BYTES,
    _SEAL_ID,
) = range(11)
_SEALED_WORDS = slice(8 * _RANK, 8 * _SEAL_ID)
_UPLOAD = 16
_REPLICA = 17
_COMMIT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a stager says of a slot once the payload is in it."""

    rank: int
    attempt: int
    step: int
    table_digest: int
    sealed_at_ns: int
    upload: UploadState
    replica: ReplicaState = ReplicaState.NONE


class SlotFile:
    """One mapped slot.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is not a slot of this version.
    """

    def __init__(self, path: Path, index: int, *, populate: bool = False) -> None:
        self.path = path
        self.index = index
        self.is_closed = False
        self._handle = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(self._handle)
            self.inode = status.st_ino
            if status.st_size < PAYLOAD_AT:
                raise ValueError(f"slot {path}: {status.st_size} bytes is less than its header")
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self.map = mmap.mmap(self._handle, status.st_size, flags)
        except BaseException:
            os.close(self._handle)
            raise
        self._bytes = memoryview(self.map)
        self._words = self._bytes[:HEADER_BYTES].cast("q")
        payload_bytes, owned_bytes = self._words[_PAYLOAD_BYTES], self._words[_OWNED_BYTES]
        is_ours = self._words[_MAGIC_WORD] == _MAGIC and 0 <= owned_bytes <= payload_bytes
        if not is_ours or status.st_size != slot_bytes(payload_bytes, owned_bytes):
            self.close()
            raise ValueError(f"slot {path}: not a slot of this version")
        # From now on these, which fit the file: the header may be damaged while it is mapped,
        # and `header_fits` says so.
        self._payload_bytes, self._owned_bytes = payload_bytes, owned_bytes

    def read(self) -> Slot:
        """What the header says now."""
        words = self._words
        step = words[_STEP]
        state, replica = words[_UPLOAD], words[_REPLICA]
        return Slot(
            index=self.index,
            sealed=words[_COMMIT] == step + 1,
            step=step,
            attempt=words[_ATTEMPT],
            upload=UploadState(state) if state in _UPLOAD_STATES else UploadState.NONE,
            replica=ReplicaState(replica) if replica in _REPLICA_STATES else ReplicaState.NONE,
        )

    @property
    def is_in_place(self) -> bool:
        """Whether the file of this name is still this one."""
        try:
            return self.path.stat().st_ino == self.inode
        except FileNotFoundError:
            return False

    @property
    def table_digest(self) -> int:
        """Which shard table places the payload's tensors."""
        return self._words[_TABLE_DIGEST]

    @property
    def sealed_at_ns(self) -> int:
        """When the slot was sealed, in nanoseconds since the epoch."""
        return self._words[_SEALED_AT_NS]

    @property
    def rank(self) -> int:
        """Whose state it is."""
        return self._words[_RANK]

    def fileno(self) -> int:
        """The open file, for whoever sends from it."""
        return self._handle

    @property
    def payload(self) -> memoryview:
        """The payload's bytes. Release it before closing the slot."""
        return self._bytes[PAYLOAD_AT : PAYLOAD_AT + self._payload_bytes]

    @property
    def owned(self) -> memoryview:
        """The part of the payload that goes to storage. Release it before closing the slot."""
        return self._bytes[PAYLOAD_AT : PAYLOAD_AT + self._owned_bytes]

    @property
    def payload_bytes(self) -> int:
        """Size of the payload."""
        return self._payload_bytes

    @property
    def owned_bytes(self) -> int:
        """How much of the payload goes to storage."""
        return self._owned_bytes

    @property
    def sums(self) -> memoryview:
        """The words behind the payload, for `slot_sums`. Release them before closing the slot."""
        with self._bytes[sums_at(self._payload_bytes) :] as behind:
            return behind.cast("Q")

    @property
    def seal_id(self) -> int:
        """Tells this seal from every other of the slot; 0 while there is none."""
        words = self._words
        return words[_SEAL_ID] if words[_COMMIT] == words[_STEP] + 1 else 0

    @property
    def header_fits(self) -> bool:
        """Whether what a sealed header says is what was sealed."""
        return self._words[_SEAL_ID] == self._sealed_words_id()

    def _sealed_words_id(self) -> int:
        with self._bytes[_SEALED_WORDS] as sealed:
            return block_checksum(CHECKSUM, sealed) >> 1

    def extra(self) -> bytes:
        """The JSON text that was sealed with the payload.

        Raises:
            ValueError: it is not what was sealed.
        """
        size = self._words[_EXTRA_SIZE]
        if not 0 <= size <= EXTRA_BYTES:
            raise ValueError(f"slot {self.path}: extra of {size} bytes")
        text = bytes(self._bytes[HEADER_BYTES : HEADER_BYTES + size])
        if zlib.crc32(text) != self._words[_EXTRA_CRC]:
            raise ValueError(f"slot {self.path}: extra does not fit its checksum")
        return text

    def invalidate(self) -> None:
        """Say that the slot holds nothing. Overwrite it only after this."""
        self._words[_COMMIT] = 0
        self._words[_UPLOAD] = UploadState.NONE
        self._words[_REPLICA] = ReplicaState.NONE
        fence()

    def seal(self, seal: Seal, extra: bytes) -> None:
        """Say that the payload is whole; it must have been written before."""
        if len(extra) > EXTRA_BYTES:
            raise ValueError(f"extra: {len(extra)} bytes of JSON; at most {EXTRA_BYTES}")
        words = self._words
        self._bytes[HEADER_BYTES : HEADER_BYTES + len(extra)] = extra
        words[_EXTRA_SIZE] = len(extra)
        words[_EXTRA_CRC] = zlib.crc32(extra)
        words[_RANK] = seal.rank
        words[_ATTEMPT] = seal.attempt
        words[_STEP] = seal.step
        words[_TABLE_DIGEST] = seal.table_digest
        words[_SEALED_AT_NS] = seal.sealed_at_ns
        words[_PAYLOAD_BYTES], words[_OWNED_BYTES] = self._payload_bytes, self._owned_bytes
        words[_UPLOAD] = seal.upload
        words[_REPLICA] = seal.replica
        words[_SEAL_ID] = self._sealed_words_id()
        reach(CrashPoint.SLOT_HEADER_WRITTEN)
        fence()
        words[_COMMIT] = seal.step + 1

    def set_upload(self, state: UploadState) -> None:
        """Say what becomes of the slot's upload."""
        self._words[_UPLOAD] = state

    def set_replica(self, state: ReplicaState) -> None:
        """Say what becomes of the slot's copy on another node."""
        self._words[_REPLICA] = state

    def try_lock(self, *, exclusive: bool) -> bool:
        """Take the file's lock without waiting; says whether that worked."""
        operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self._handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unmap the slot and give its lock back; whoever uses views of it must drop them first.

        Where somebody has not (a storage call that hangs), the mapping lives as long as the view.
        """
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(BufferError):
            self._words.release()
            self._bytes.release()
            self.map.close()
        # The kernel lets go of it, whatever it says.
        with contextlib.suppress(OSError):
            os.close(self._handle)


_UPLOAD_STATES = frozenset(UploadState)
_REPLICA_STATES = frozenset(ReplicaState)


def text_of(extra: dict[str, object]) -> bytes:
    """`extra` as a slot holds it.

    Raises:
        TypeError: it holds what JSON cannot say.
        ValueError: it is longer than a slot has room for.
    """
    text = canonical(extra)
    if len(text) > EXTRA_BYTES:
        raise ValueError(f"extra: {len(text)} bytes of JSON; at most {EXTRA_BYTES}")
    return text


def write_first_header(handle: int, table: ShardTable) -> None:
    """Make an open file, which is large enough for one, a slot without a seal."""
    with mmap.mmap(handle, HEADER_BYTES) as header:
        words = memoryview(header).cast("q")
        words[_RANK] = table.rank
        words[_PAYLOAD_BYTES] = table.payload_bytes
        words[_OWNED_BYTES] = table.owned_bytes
        words[_TABLE_DIGEST] = table.digest
        words[_MAGIC_WORD] = _MAGIC
        words.release()


def sums_at(payload_bytes: int) -> int:
    """Where the checksums of a payload begin in its slot."""
    return PAYLOAD_AT + -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(payload_bytes: int, owned_bytes: int) -> int:
    """Size of a slot's file."""
    words = SUMS_HEADER_WORDS + num_blocks(payload_bytes, owned_bytes)
    return sums_at(payload_bytes) + 8 * words


def slot_path(folder: Path, index: int) -> Path:
    """File of a rank's slot in its folder."""
    return folder / f"slot-{index}"


def read_table(folder: Path) -> ShardTable | None:
    """The shard table of a rank's folder; None when there is none that we can read."""
    try:
        return _parse_table((folder / TABLE_FILE).read_bytes())
    except (FileNotFoundError, RecordError):
        return None


def has_damaged_table(folder: Path) -> bool:
    """Whether there is a shard table that is not what was written."""
    return read_table(folder) is None and (folder / TABLE_FILE).exists()


# A restart reads the one of its rank several times, and a large model's takes long.
@lru_cache(maxsize=1)
def _parse_table(raw: bytes) -> ShardTable:
    return ShardTable.from_json(raw)


def open_existing(folder: Path) -> list[SlotFile]:
    """The slots that lie in a rank's folder, sealed or not."""
    found = []
    for index in range(NUM_SLOTS_WITH_REPLICAS):
        try:
            found.append(SlotFile(slot_path(folder, index), index))
        except (FileNotFoundError, ValueError):
            continue
    return found
