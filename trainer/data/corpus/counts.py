"""How far processes that tokenise are, in memory that they share."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import SpawnContext


class Counts:
    """Bytes that were read and tokens that were made of them, by all processes together."""

    def __init__(self, context: SpawnContext) -> None:
        self._sums = context.Array("q", 2)
        # What was reported of them, in the process that shows it.
        self._reported = (0, 0)

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """Count more, in a process that tokenises."""
        with self._sums.get_lock():
            self._sums[0] += num_bytes
            self._sums[1] += num_tokens

    def report(self, done: Callable[[int, int], None]) -> None:
        """Call `done` with what has come since the last time, if anything has."""
        with self._sums.get_lock():
            now = self._sums[0], self._sums[1]
        before, self._reported = self._reported, now
        if now != before:
            done(now[0] - before[0], now[1] - before[1])
