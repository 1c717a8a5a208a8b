"""When a worker wrote what stands in its log.

Workers write to plain files, so nobody sees a line come. The agent reads new lines every
few seconds anyway and notes, beside the log, how far it was and when it was last written:
16 bytes each time that there is something new. A line is as old as the note behind it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from outlast import private

_NOTE = struct.Struct("<Qd")


class LogTimes:
    """The notes beside one log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._path = log.with_name(f"{log.name}.times")

    def note(self, end: int, at_s: float) -> None:
        """What lies before `end` was there at `at_s`.

        Raises:
            OSError: the disk is full, or the folder has gone.
        """
        with private.open_to_append(self._path) as file:
            file.write(_NOTE.pack(end, at_s))

    def pieces(self, offset: int, data: bytes) -> Iterator[tuple[bytes, float]]:
        """What was read at `offset`, cut where its time changes, with the time of each."""
        ends, times = self._notes()
        at = bisect_right(ends, offset)
        while data:
            if at >= len(ends):
                yield data, self._written_s()
                return
            size = ends[at] - offset
            if size > 0:
                yield data[:size], times[at]
                offset, data = offset + size, data[size:]
            at += 1

    def since(self, since_s: float) -> int:
        """From where on everything was written at or after this time."""
        ends, times = self._notes()
        if self._written_s() < since_s:
            # Nothing of it: whatever is written from now on.
            return self._size()
        at = len(times)
        # The node's clock may have been set, so the newest are looked at first.
        while at and times[at - 1] >= since_s:
            at -= 1
        return ends[at - 1] if at else 0

    def written_s(self, ends: Sequence[int]) -> list[float]:
        """When what ends there was written."""
        noted, times = self._notes()
        found = (bisect_left(noted, end) for end in ends)
        last_s = self._written_s()
        return [times[at] if at < len(times) else last_s for at in found]

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _notes(self) -> tuple[list[int], list[float]]:
        try:
            content = self._path.read_bytes()
        except OSError:
            return [], []
        # The last note may be half written.
        whole = content[: len(content) - len(content) % _NOTE.size]
        notes = list(_NOTE.iter_unpack(whole))
        return [end for end, _ in notes], [at_s for _, at_s in notes]

    def _written_s(self) -> float:
        try:
            return self._log.stat().st_mtime
        except OSError:
            return 0.0
