"""A rank's host memory as its agent sees it: it may not be there yet, or be made anew."""

from __future__ import annotations

import contextlib
from pathlib import Path

from checkpoint.core.slots import NUM_SLOTS_WITH_REPLICAS
from checkpoint.stage import slotfile
from checkpoint.stage.slotfile import SlotFile


class WatchedFolder:
    """The slots of one rank, kept open between looks."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._slots: dict[int, SlotFile] = {}

    def slots(self) -> list[SlotFile]:
        """The slots that are there now; each stays open until it is replaced or `close`."""
        for index in range(NUM_SLOTS_WITH_REPLICAS):
            self._refresh(index)
        return list(self._slots.values())

    def close(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _refresh(self, index: int) -> None:
        path = slotfile.slot_path(self.path, index)
        known = self._slots.get(index)
        fresh: SlotFile | None = None
        with contextlib.suppress(FileNotFoundError, ValueError):
            if known is not None and path.stat().st_ino == known.inode:
                return
            fresh = SlotFile(path, index)
        if known is not None:
            known.close()
            del self._slots[index]
        if fresh is not None:
            self._slots[index] = fresh
