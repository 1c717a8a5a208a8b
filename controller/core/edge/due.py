"""What is due next, in order of time, so that nobody goes through everything to find it.

An entry may be early and is never late: who takes a key looks whether it is really due, and
puts it back otherwise. So what is put off all the time, as a healthy node's silence is, costs
one look in a while and nothing in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

_Key = TypeVar("_Key")


class DueQueue(Generic[_Key]):
    """Each key once, with the moment at which to look at it."""

    def __init__(self) -> None:
        # Entries that were replaced by earlier ones stay until their time comes.
        self._heap: list[tuple[float, int, _Key]] = []
        self._due_s: dict[_Key, float] = {}
        self._num_put = 0

    def put(self, key: _Key, at_s: float) -> None:
        """Look at it then, or earlier if that was wanted before."""
        known_s = self._due_s.get(key)
        if known_s is not None and known_s <= at_s:
            return
        self._due_s[key] = at_s
        self._num_put += 1
        heapq.heappush(self._heap, (at_s, self._num_put, key))

    def forget(self, key: _Key) -> None:
        """Nobody needs to look at it any more."""
        self._due_s.pop(key, None)

    def take(self, now_s: float) -> Iterator[_Key]:
        """Those whose moment has come, the earliest first, each taken out as it is given.

        What is put back meanwhile must not be due by then.
        """
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, key = heapq.heappop(self._heap)
            if self._due_s.get(key) == at_s:
                del self._due_s[key]
                yield key

    def next_s(self) -> float | None:
        """The earliest moment; None when there is nothing."""
        while self._heap and self._due_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
