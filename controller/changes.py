"""Wakes whoever follows something that changes."""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes those who look at the state whenever it may have changed."""

    def __init__(self) -> None:
        self.version = 0
        self._next: asyncio.Future[None] | None = None

    def fire(self) -> None:
        self.version += 1
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def wait(self, seen: int) -> int:
        """The present version, once it is newer than `seen`."""
        while self.version == seen:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            # Shielded: one watcher that leaves must not end the wait of the others.
            await asyncio.shield(self._next)
        return self.version
