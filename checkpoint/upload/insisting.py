"""A step that must get to storage: whatever of it is missing there is uploaded again.

An upload that fails is given up otherwise, as the next one is about to come; after a job's
last step there is none. Each node looks after its own parts, by what is in storage: a part
that failed, or that was deleted when another node's failed, is wanted again, until the step is
committed or the time is over. The uploader's thread calls `look` between uploads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checkpoint.core import names
from checkpoint.core.slots import UploadState, newest_sealed
from checkpoint.errors import StorageUnavailableError
from checkpoint.stage.rank_folder import WatchedFolder
from checkpoint.stage.slotfile import SlotFile
from checkpoint.storage.storage import Storage
from checkpoint.upload.commit import Coordinator

# The first look leaves an upload that goes well the time to be committed; the longest pause is
# short beside the minutes that people take to make room.
_FIRST_LOOK_S = 2.0
_LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class _Goal:
    step: int
    until_s: float
    next_s: float
    pause_s: float


class Insisting:
    """Which step must get to storage from these folders, if any."""

    def __init__(
        self,
        folders: Sequence[WatchedFolder],
        *,
        last_step: int | None,
        for_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`last_step` must, once it is sealed here, for so long."""
        self._folders = folders
        self._last_step = last_step
        self._for_s = for_s
        self._clock = clock
        self._goal: _Goal | None = None
        # For how long to insist on whatever is newest, when somebody asks for it.
        self._asked_s: float | None = None
        self.step = -1
        """What was insisted on last; -1 for nothing, or when there was nothing."""
        self.is_committed = False

    @property
    def is_active(self) -> bool:
        return self._goal is not None or self._asked_s is not None

    def begin(self, for_s: float) -> None:
        """Insist on the newest step that all folders hold; any thread may ask for it."""
        self._asked_s = for_s

    def again(self, last_step: int | None) -> None:
        """Begin anew with the last step: the job was started again."""
        self._last_step = last_step

    def end(self) -> None:
        """Let go: the job does not need it any more."""
        self._last_step = self._asked_s = self._goal = None

    def look(self, storage: Callable[[], Storage], coordinator: Coordinator | None) -> str:
        """Want again what is missing; returns what is in the way, "" for nothing."""
        now_s = self._clock()
        self._choose(now_s)
        goal = self._goal
        if goal is None or now_s < goal.next_s:
            return ""
        goal.next_s, goal.pause_s = now_s + goal.pause_s, min(2 * goal.pause_s, _LONGEST_PAUSE_S)
        try:
            store = storage()
            self.is_committed = goal.step in store.committed_steps()
            for folder in () if self.is_committed else self._folders:
                slot = _holding(folder, goal.step)
                if slot is not None and not slot.read().is_pinned:
                    _want_again(folder, slot, store, coordinator)
        except StorageUnavailableError as error:
            return str(error)
        finally:
            if self._goal is goal and (self.is_committed or now_s > goal.until_s):
                self._goal = None
        return ""

    def _choose(self, now_s: float) -> None:
        """Take up what is asked for, or the last step once it is there."""
        asked_s, last = self._asked_s, self._last_step
        if asked_s is not None:
            self.step = min((_newest(folder) for folder in self._folders), default=-1)
            self.is_committed = False
            self._goal = None
            if self.step >= 0:
                self._goal = _Goal(self.step, now_s + asked_s, now_s, _FIRST_LOOK_S)
            self._asked_s = None
        elif last is not None and any(_holding(folder, last) for folder in self._folders):
            self._last_step = None
            self.step, self.is_committed = last, False
            until_s, next_s = now_s + self._for_s, now_s + _FIRST_LOOK_S
            self._goal = _Goal(last, until_s, next_s, _FIRST_LOOK_S)


def _want_again(
    folder: WatchedFolder, slot: SlotFile, storage: Storage, coordinator: Coordinator | None
) -> None:
    """Ask for the upload of a part that is not in storage; for its commit if it is."""
    facts = slot.read()
    records = f"{names.attempt_folder(facts.step, facts.attempt)}/{names.PARTS}"
    stored = {names.parse_part(entry.name) for entry in storage.entries(records)}
    if folder.rank not in stored:
        slot.set_upload(UploadState.WANTED)
    elif coordinator is not None and not coordinator.expects(facts.step, facts.attempt):
        coordinator.expect(facts.step, facts.attempt, sealed_at_ns=slot.sealed_at_ns)


def _holding(folder: WatchedFolder, step: int) -> SlotFile | None:
    for slot in folder.slots():
        facts = slot.read()
        if facts.sealed and facts.step == step:
            return slot
    return None


def _newest(folder: WatchedFolder) -> int:
    return newest_sealed([slot.read() for slot in folder.slots()])
