"""Makes uploaded parts a checkpoint: manifest, commit record, then cleaning up.

One node's uploader coordinates: it waits until every saver rank's part has
arrived in storage, which is all that nodes need to share. It looks at storage
only, so that a coordinator that takes over, or comes back, finishes what it
finds there.

What does not belong here: threads, and host memory (`uploader.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError, sha256
from checkpoint.core.manifest import CommitRecord, Manifest, PartRecord
from checkpoint.core.ownership import check_owned_once
from checkpoint.core.pacing import Cadence
from checkpoint.core.retention import RetentionPolicy
from checkpoint.errors import CorruptCheckpointError, StorageUnavailableError
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import Cleaner, attempt_folders, quarantined
from checkpoint.upload.records import Records
from outlast.chosen import ChosenStart, is_given_up
from outlast.clock import node_time_ns
from outlast.crashpoints import CrashPoint, reach

logger = logging.getLogger(__name__)

# Listing an object store costs money and time: often at first, when local parts are
# complete and the others are about to be, then ever more rarely.
_FIRST_POLL_S = 0.05
_SLOWEST_POLL_S = 2.0
_POLL_GROWTH = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRules:
    """What the spec says about checkpoints in storage."""

    retention: RetentionPolicy
    timeout_s: float
    """For an upload, and for the parts of all nodes to arrive."""
    interval_steps: int
    """Training asks for an upload every so many steps."""
    last_step: int | None = None
    """This one must get to storage; None: none must."""
    last_timeout_s: float = 0.0
    """How long that is tried."""
    chosen: tuple[ChosenStart, ...] = ()
    """Where persons let the job go on: what is given up is not committed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint exists now. `total_s` counts from the sealing in host memory.

    `is_behind` says that storage has been too slow for the interval for a while.
    """

    step: int
    size_bytes: int
    upload_s: float
    total_s: float
    is_behind: bool
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something did not work; training goes on. `stage` is upload, commit or retention."""

    step: int
    stage: str
    detail: str


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint whose parts are arriving."""

    step: int
    attempt: int
    began_s: float
    sealed_at_ns: int
    # Found in storage rather than begun here: giving it up is no news, and its folder
    # may belong to a coordinator that we do not know of.
    adopted: bool
    poll_s: float = _FIRST_POLL_S
    next_poll_s: float = field(default=0.0)
    # Records of this node's own parts, by their bytes.
    delivered: dict[bytes, PartRecord] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return names.attempt_folder(self.step, self.attempt)


class Coordinator:
    """Commits the checkpoints of one job. Used by one thread."""

    def __init__(
        self,
        storage: Storage,
        saver_ranks: Sequence[int],
        rules: CommitRules,
    ) -> None:
        self._storage = storage
        self._saver_ranks = frozenset(saver_ranks)
        self._records = Records(storage)
        self._timeout_s = rules.timeout_s
        self._cadence = Cadence(rules.interval_steps)
        # Nobody writes on after its own deadline; twice that, for what it was late to hear of.
        self._cleaner = Cleaner(
            storage, rules.retention, grace_s=2 * rules.timeout_s, chosen=rules.chosen
        )
        self._chosen = rules.chosen
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._is_clean = True

    @property
    def is_waiting(self) -> bool:
        """Whether parts of a checkpoint are awaited."""
        return bool(self._pending)

    def expect(self, step: int, attempt: int, *, sealed_at_ns: int) -> None:
        """Wait for the parts of a checkpoint from now on."""
        known = self._pending.get((step, attempt))
        if known is None or known.adopted:
            self._pending[(step, attempt)] = _Pending(
                step=step,
                attempt=attempt,
                began_s=time.monotonic(),
                sealed_at_ns=sealed_at_ns,
                adopted=False,
            )

    def expects(self, step: int, attempt: int) -> bool:
        """Whether the parts of this checkpoint are awaited."""
        return (step, attempt) in self._pending

    def deliver(self, part: PartRecord, raw: bytes) -> None:
        """Take a part of an expected checkpoint whose record need not be parsed: `raw` is it."""
        pending = self._pending.get((part.step, part.attempt))
        if pending is not None:
            pending.delivered[raw] = part

    def adopt(self) -> CommitRecord | None:
        """Wait for what an earlier coordinator has left uncommitted; what it committed last.

        Whoever committed that may have ended before anybody heard of it. None where nothing is
        committed, or its record cannot be read.

        Raises:
            StorageUnavailableError: storage cannot be listed.
        """
        newest = max(self._storage.committed_steps(), default=-1)
        found = self._record_of(newest)
        corrupt = quarantined(self._storage)
        folders = attempt_folders(self._storage)
        # Whoever committed last may have died before it had cleaned up.
        self._is_clean = not folders
        for folder in folders:
            if folder.step == newest:
                self._delete(f"{names.attempt_folder(*astuple(folder))}/{names.PARTS}")
            # What was found corrupt must not come back under another record.
            is_out = (folder.step, folder.attempt) in corrupt or is_given_up(
                self._chosen, folder.step, folder.attempt
            )
            if folder.step > newest and not is_out:
                self._pending.setdefault(
                    (folder.step, folder.attempt),
                    _Pending(
                        step=folder.step,
                        attempt=folder.attempt,
                        began_s=time.monotonic(),
                        sealed_at_ns=node_time_ns(),
                        adopted=True,
                    ),
                )
        return found

    def _record_of(self, step: int) -> CommitRecord | None:
        if step < 0:
            return None
        path = names.commit_path(step)
        try:
            return CommitRecord.from_json(self._storage.read_bytes(path))
        except (RecordError, FileNotFoundError) as error:
            # Whoever loads it says so.
            logger.warning("commit record not readable: %s: %s", path, error)
            return None

    def give_up(self, step: int, attempt: int) -> None:
        """Stop waiting for a checkpoint: a part of it cannot come. Frees what it takes."""
        pending = self._pending.pop((step, attempt), None)
        if pending is not None:
            self._discard(pending)

    def poll(self) -> Iterator[Committed | Trouble]:
        """Commit what is complete, drop what is overdue or outdated."""
        if not self._is_clean:
            self._is_clean = True
            self._tidy()
        for key, pending in sorted(self._pending.items()):
            now_s = time.monotonic()
            if key not in self._pending or now_s < pending.next_poll_s:
                continue
            pending.poll_s = min(pending.poll_s * _POLL_GROWTH, _SLOWEST_POLL_S)
            pending.next_poll_s = now_s + pending.poll_s
            yield from self._advance(pending)

    def _advance(self, pending: _Pending) -> Iterator[Committed | Trouble]:
        overdue = time.monotonic() - pending.began_s > self._timeout_s
        try:
            arrived = self._arrived(pending)
            done = None if self._saver_ranks - arrived else self._commit(pending)
        except (StorageUnavailableError, CorruptCheckpointError) as error:
            lasting = not isinstance(error, StorageUnavailableError) or error.lasting
            if not (overdue or lasting):
                return
            yield from self._abandon(pending, str(error))
            return
        if done is not None:
            # A checkpoint that would be no newer than this one is of no use to anybody.
            for other in [other for other in self._pending if other[0] <= done.step]:
                del self._pending[other]
            yield done
            yield from self._clean_up(done.step)
        elif overdue:
            missing = sorted(self._saver_ranks - arrived)
            yield from self._abandon(
                pending,
                f"parts of {len(missing)} of {len(self._saver_ranks)} saver ranks did not arrive "
                f"in {self._timeout_s:g} s (first missing: rank {missing[0]})"
                if missing
                else "its parts do not belong together",
            )

    def _abandon(self, pending: _Pending, detail: str) -> Iterator[Trouble]:
        del self._pending[(pending.step, pending.attempt)]
        if pending.adopted:
            # Swept with other remains, now or later: when nobody can be writing it any more.
            logger.info("unfinished checkpoint left: %s: %s", pending.folder, detail)
            self._tidy()
            return
        self._discard(pending)
        yield Trouble(step=pending.step, stage="commit", detail=detail)

    def _arrived(self, pending: _Pending) -> set[int]:
        entries = self._storage.entries(f"{pending.folder}/{names.PARTS}")
        ranks = (names.parse_part(entry.name) for entry in entries)
        return {rank for rank in ranks if rank is not None}

    def _commit(self, pending: _Pending) -> Committed | None:
        """Commit a checkpoint whose parts are there; None when they do not belong together."""
        manifest = self._manifest(pending)
        if manifest is None:
            return None
        reach(CrashPoint.PARTS_ARRIVED)
        raw = self._records.put_manifest(manifest)
        reach(CrashPoint.MANIFEST_STORED)
        commit = CommitRecord(
            step=pending.step,
            attempt=pending.attempt,
            world_size=manifest.world_size,
            size_bytes=manifest.size_bytes,
            manifest_sha256=sha256(raw),
        )
        winner = self._records.put_commit(commit, raw)
        reach(CrashPoint.COMMITTED)
        if winner != commit:
            logger.info(
                "checkpoint committed by another attempt: step=%d attempt=%d winner=%d",
                commit.step,
                commit.attempt,
                winner.attempt,
            )
            if winner.attempt != commit.attempt:
                self._delete(pending.folder)
        # The manifest says it all: from here on every file of a checkpoint is one that is
        # verified whenever it is read.
        self._delete(f"{pending.folder}/{names.PARTS}")
        reach(CrashPoint.RECORDS_DELETED)
        return Committed(
            step=winner.step,
            size_bytes=winner.size_bytes,
            upload_s=time.monotonic() - pending.began_s,
            total_s=max(0.0, (node_time_ns() - pending.sealed_at_ns) / 1e9),
            is_behind=self._cadence.is_behind_after(winner.step, time.monotonic()),
            attempt=winner.attempt,
        )

    def _manifest(self, pending: _Pending) -> Manifest | None:
        """What the parts are together, checked; None when they do not belong together."""
        parts = [self._read_part(pending, rank) for rank in sorted(self._saver_ranks)]
        if any(part.num_parts != len(parts) for part in parts):
            return None
        sizes = {entry.name: entry.nbytes for entry in self._storage.entries(pending.folder)}
        for part in parts:
            if sizes.get(part.file) != part.nbytes:
                raise CorruptCheckpointError(
                    pending.step,
                    f"{pending.folder}/{part.file} has {sizes.get(part.file)} bytes, "
                    f"not {part.nbytes}",
                )
        try:
            manifest = Manifest(
                step=pending.step,
                attempt=pending.attempt,
                world_size=parts[0].world_size,
                parts=tuple(parts),
            )
            check_owned_once(tensor for part in parts for tensor in part.tensors)
        except ValueError as error:
            raise CorruptCheckpointError(pending.step, str(error)) from error
        return manifest

    def _read_part(self, pending: _Pending, rank: int) -> PartRecord:
        path = f"{pending.folder}/{names.PARTS}/{names.part_name(rank)}"
        try:
            raw = self._storage.read_bytes(path)
            part = pending.delivered.get(raw) or PartRecord.from_json(raw)
        except (RecordError, FileNotFoundError) as error:
            raise CorruptCheckpointError(pending.step, f"{path}: {error}") from error
        own = (pending.step, pending.attempt, rank)
        if (part.step, part.attempt, part.rank) != own:
            raise CorruptCheckpointError(pending.step, f"{path}: is another part's record")
        return part

    def _discard(self, pending: _Pending) -> None:
        """Delete what arrived of a checkpoint that will not be committed by us."""
        try:
            committed = pending.step in self._storage.committed_steps()
        except StorageUnavailableError as error:
            logger.info("unfinished checkpoint left: %s: %s", pending.folder, error)
            return
        reach(CrashPoint.GIVING_UP)
        # Where the step exists, it may be this very folder; the sweep looks closer.
        if not committed:
            self._delete(pending.folder)

    def _delete(self, folder: str) -> None:
        try:
            self._storage.delete_folder(folder)
        except StorageUnavailableError as error:
            logger.info("unfinished checkpoint left: %s: %s", folder, error)

    def _tidy(self) -> None:
        """Clean up as after a commit. Storage that does not let us will say so of an upload."""
        try:
            self._cleaner.clean(waiting=self._pending)
        except (StorageUnavailableError, CorruptCheckpointError) as error:
            logger.info("not cleaned up: %s", error)

    def _clean_up(self, step: int) -> Iterator[Trouble]:
        try:
            self._cleaner.clean(waiting=self._pending)
        except (StorageUnavailableError, CorruptCheckpointError) as error:
            yield Trouble(step=step, stage="retention", detail=str(error))
