"""Stage 2: sealed slots go from host memory to storage, in the background.

One thread in the node agent, without torch, at low priority. It outlives the
workers, so what a killed worker had sealed is still uploaded. A failed or slow
upload is reported and never touches training: the slot is given back, and the
next wanted step is the next try.

What does not belong here: deciding when to upload (the trainer asks by a word in
the slot's header), and committing (`commit.py`).
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from checkpoint.core import names
from checkpoint.core.manifest import CommitRecord
from checkpoint.core.pacing import DEFAULT_LIMITS, TransferLimits, backoff_s
from checkpoint.core.slots import Slot, UploadState
from checkpoint.errors import (
    CorruptCheckpointError,
    DamagedMemoryError,
    StorageUnavailableError,
)
from checkpoint.stage.damage import refuse
from checkpoint.stage.slotfile import SlotFile
from checkpoint.storage.root_owner import Owner, claim
from checkpoint.storage.storage import CALL_DEADLINE_S, Storage
from checkpoint.upload.background import give_way_to_training
from checkpoint.upload.commit import CommitRules, Committed, Coordinator, Trouble
from checkpoint.upload.insisting import Insisting
from checkpoint.upload.part import Part, RankFolder
from checkpoint.upload.transfer import StoppedError, Transfer
from outlast.chosen import is_given_up
from outlast.crashpoints import CrashPoint, reach

logger = logging.getLogger(__name__)

_POLL_S = 0.005
# While there is nothing to do. A look at the slots of a rank takes 40 us: with eight ranks, 200
# looks a second would take 6 % of a core for as long as they train.
_IDLE_POLL_S = 0.025
# Of a whole file; its parts have tries of their own.
_NUM_TRIES = 3
_RETRY_AFTER_S = 1.0
# A storage call that hangs is left behind when the uploader stops.
_JOIN_S = 5.0

OnCommitted = Callable[[Committed], None]
OnTrouble = Callable[[int, str, str], None]
OnFound = Callable[[CommitRecord], None]


class Uploader:
    """Uploads the slots of one job's ranks on this node.

    `url` is the job's own checkpoint root. The uploads that count are those of
    `saver_ranks`; this node has those of them that are in `local_ranks`, below
    `memory_dir`. The coordinator also commits, and keeps what `rules` say. Uploads take no
    more of the node than `limits`; `jitter` is chance in 0..1 for the waits between tries.
    Nothing is written to a root that belongs to another than `owner`; None asks nobody.

    `on_committed(committed)` and `on_trouble(step, stage, detail)` are called in the
    uploader's thread, and so is `on_found(record)`, once: of a coordinator, with the newest
    checkpoint that was committed before it began.
    """

    def __init__(
        self,
        url: str,
        job_id: str,
        memory_dir: Path,
        local_ranks: Sequence[int],
        saver_ranks: Sequence[int],
        coordinator: bool,
        rules: CommitRules,
        on_committed: OnCommitted,
        on_trouble: OnTrouble,
        *,
        on_found: OnFound = lambda found: None,
        limits: TransferLimits = DEFAULT_LIMITS,
        jitter: Callable[[], float] = random.random,
        owner: Owner | None = None,
    ) -> None:
        self._url = url
        self._job_id = job_id
        self._rules = rules
        self._limits = limits
        self._jitter = jitter
        self._owner = owner
        self._memory_dir = memory_dir
        self._is_coordinator = coordinator
        self._saver_ranks = tuple(saver_ranks)
        self._on_committed = on_committed
        self._on_trouble = on_trouble
        self._on_found = on_found
        self._folders = [
            RankFolder(memory_dir / names.memory_folder(rank), rank)
            for rank in sorted(set(local_ranks) & set(saver_ranks))
        ]
        self.insisting = Insisting(
            self._folders, last_step=rules.last_step, for_s=rules.last_timeout_s
        )
        # What an upload or a commit failed of last.
        self.last_trouble = ""
        self._storage: Storage | None = None
        self._transfer: Transfer | None = None
        self._coordinator: Coordinator | None = None
        self._stopping = threading.Event()
        self._passed = threading.Condition()
        self._passes_begun = 0
        self._last_idle_pass = 0
        self._thread = threading.Thread(
            target=self._run, name=f"checkpoint-upload-{job_id}", daemon=True
        )

    def start(self) -> None:
        """Begin to watch the slots."""
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to upload or commit; says whether that came in time."""
        with self._passed:
            wanted = self._passes_begun + 1
            return self._passed.wait_for(
                lambda: self._last_idle_pass >= wanted or not self._thread.is_alive(), timeout_s
            ) and (self._last_idle_pass >= wanted)

    def stop(self) -> None:
        """Stop at once; an upload under way is left for the next uploader to begin again."""
        self._stopping.set()
        if self._storage is not None:
            self._storage.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        give_way_to_training()
        try:
            while not self._stopping.is_set():
                with self._passed:
                    self._passes_begun += 1
                    number = self._passes_begun
                is_idle = self._guarded_pass()
                with self._passed:
                    if is_idle:
                        self._last_idle_pass = number
                    self._passed.notify_all()
                self._stopping.wait(_IDLE_POLL_S if is_idle else _POLL_S)
        finally:
            for folder in self._folders:
                folder.close()

    def _guarded_pass(self) -> bool:
        try:
            return self._pass()
        except Exception as error:
            # A thread that dies silently uploads no more.
            logger.exception("uploader failed: job=%s", self._job_id)
            self._on_trouble(-1, "upload", f"{type(error).__name__}: {error}")
            self._stopping.wait(_RETRY_AFTER_S)
            return False

    def _pass(self) -> bool:
        """Upload and commit what is due; says whether there was nothing to do."""
        is_idle = True
        if trouble := self.insisting.look(self._open, self._coordinator):
            self._tell(Trouble(step=self.insisting.step, stage="upload", detail=trouble))
        for folder in self._folders:
            slot = folder.next_upload()
            if slot is not None and not self._stopping.is_set():
                is_idle = False
                self._upload(folder, slot)
        coordinator = self._connect()
        if coordinator is not None:
            for news in coordinator.poll():
                self._tell(news)
            is_idle = is_idle and not coordinator.is_waiting
        return is_idle

    def _connect(self) -> Coordinator | None:
        """The coordinator, made when storage first answers; None on the other nodes."""
        if not self._is_coordinator or self._stopping.is_set():
            return None
        if self._coordinator is None:
            try:
                coordinator = Coordinator(self._open(), self._saver_ranks, self._rules)
                found = coordinator.adopt()
            except StorageUnavailableError as error:
                # Nothing is lost yet; an upload will meet the same and report it.
                logger.warning("storage not readable: job=%s %s", self._job_id, error)
                self._stopping.wait(_RETRY_AFTER_S)
                return None
            self._coordinator = coordinator
            if found is not None:
                self._on_found(found)
        return self._coordinator

    def _open(self) -> Storage:
        if self._storage is None:
            deadline_s = min(CALL_DEADLINE_S, self._rules.timeout_s)
            storage = Storage(self._url, deadline_s=deadline_s)
            if self._owner is not None:
                claim(storage, self._owner)
            self._storage = storage
        if self._stopping.is_set():
            self._storage.close()
        return self._storage

    def _upload(self, folder: RankFolder, slot: SlotFile) -> None:
        # The lock fails while a stager is choosing this slot; the next pass looks again.
        if not slot.try_lock(exclusive=False):
            return
        try:
            facts = slot.read()
            if not facts.is_pinned:
                return
            outcome = UploadState.FAILED
            slot.set_upload(UploadState.BUSY)
            reach(CrashPoint.UPLOAD_BEGUN)
            try:
                outcome = self._outcome(folder, slot, facts)
            finally:
                slot.set_upload(outcome)
                reach(CrashPoint.UPLOAD_DONE)
        finally:
            slot.unlock()

    def _outcome(self, folder: RankFolder, slot: SlotFile, facts: Slot) -> UploadState:
        part = Part(folder, slot, facts, num_parts=len(self._saver_ranks))
        try:
            self._try(part)
        except StoppedError:
            return UploadState.WANTED
        except DamagedMemoryError as error:
            # Nothing is wrong with storage: the incident is about this node's memory.
            refuse(self._memory_dir, slot, error)
            self._clean_up(part)
            return UploadState.NONE
        except (StorageUnavailableError, CorruptCheckpointError, OSError) as error:
            # OSError: host memory cannot be read now, for want of descriptors for example.
            if self._stopping.is_set():
                return UploadState.WANTED
            self._clean_up(part)
            self._tell(Trouble(step=facts.step, stage="upload", detail=str(error)))
            return UploadState.FAILED
        return UploadState.DONE

    def _try(self, part: Part) -> None:
        if is_given_up(self._rules.chosen, part.facts.step, part.facts.attempt):
            return
        deadline_s = time.monotonic() + self._rules.timeout_s
        for num_failures in range(1, _NUM_TRIES + 1):
            try:
                storage = self._open()
                # Nothing is written for a step that exists: its bytes are settled.
                if part.facts.step not in storage.committed_steps():
                    self._expect(part)
                    if part.is_stored(storage):
                        return
                    if self._transfer is None:
                        self._transfer = Transfer(
                            storage, self._limits, pause=self._stopping.wait, jitter=self._jitter
                        )
                    stored = part.write(partial(self._transfer.send, deadline_s=deadline_s))
                    if self._coordinator is not None:
                        self._coordinator.deliver(*stored)
                return
            except StorageUnavailableError as error:
                wait_s = backoff_s(num_failures, self._jitter())
                is_late = time.monotonic() + wait_s > deadline_s
                if error.lasting or is_late or num_failures == _NUM_TRIES:
                    raise
                logger.info("upload tried again: job=%s %s", self._job_id, error)
            if self._stopping.wait(wait_s):
                raise StoppedError

    def _expect(self, part: Part) -> None:
        coordinator = self._connect()
        if coordinator is not None:
            facts = part.facts
            coordinator.expect(facts.step, facts.attempt, sealed_at_ns=part.slot.sealed_at_ns)

    def _clean_up(self, part: Part) -> None:
        """Give back the room that half a checkpoint takes: the store may be full."""
        if self._coordinator is not None:
            self._coordinator.give_up(part.facts.step, part.facts.attempt)
        elif self._storage is not None:
            with contextlib.suppress(StorageUnavailableError):
                part.delete(self._storage)

    def _tell(self, news: Committed | Trouble) -> None:
        match news:
            case Committed():
                self._on_committed(news)
            case Trouble():
                self.last_trouble = news.detail
                self._on_trouble(news.step, news.stage, news.detail)
