"""What ended a part of the controller that nobody awaits, for the one who must know."""

from __future__ import annotations

import asyncio


class Failure:
    """The first thing that went wrong beyond all that is tried again."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()
        self._error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Something failed; called in the loop."""
        if self._error is None:
            self._error = error
            self._happened.set()

    def note_end(self, task: asyncio.Task[None]) -> None:
        """A task that may only be cancelled has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note(error)

    async def raised(self) -> None:
        """Wait for it, and raise it."""
        await self._happened.wait()
        assert self._error is not None
        raise self._error
