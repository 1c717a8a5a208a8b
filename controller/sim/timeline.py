"""Virtual time: a heap of things to do, in an order that the seed decides alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable

# Any epoch will do; zero is left out because "no time yet" must not look like a time.
EPOCH_S = 1_000_000.0


class Timeline:
    """What happens when. Ties run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = EPOCH_S
        self.num_run = 0
        self.num_asked = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, at_s: float, action: Callable[..., None], *args: object) -> None:
        """Do this at a time; a time that has passed means now."""
        self.num_asked += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self.num_asked, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        """Do this some seconds from now."""
        self.at(self.now_s + delay_s, action, *args)

    def run_until(self, end_s: float) -> None:
        """Let time pass up to and including `end_s`."""
        heap = self._heap
        while heap and heap[0][0] <= end_s:
            self.now_s, _, action, args = heapq.heappop(heap)
            self.num_run += 1
            action(*args)
        self.now_s = end_s
