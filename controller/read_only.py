"""Read-only mode: while the journal's disk is full, nothing is decided.

Agents stay connected and train on, what they report waits, and everything can be read. It ends
by itself when there is room for the reserve and for what is written next: see `store.reserve`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from controller.refusals import ReadOnlyError
from controller.store.backend import DiskFullError
from controller.store.journal import Journal
from controller.store.reserve import Reserve

logger = logging.getLogger(__name__)

# How often we look for room.
LOOK_S = 1.0


class ReadOnly:
    """Whether the controller is read-only, and why."""

    def __init__(
        self, journal: Journal, reserve: Reserve | None, on_change: Callable[[], None]
    ) -> None:
        self.why = ""
        self._journal = journal
        self._reserve = reserve
        self._on_change = on_change
        self._look_s = 0.0

    @property
    def free_bytes(self) -> int | None:
        """Room on the journal's disk; None when nobody said which one that is."""
        return None if self._reserve is None else self._reserve.free_bytes()

    def begin(self, why: str) -> None:
        """Decide nothing until there is room on the journal's disk."""
        is_new, self.why = not self.why, why
        if is_new:
            logger.error("alert: read-only, the journal's disk is full: %s", why)
            self._on_change()

    def check(self) -> None:
        """Refuse a request while it could not be journalled.

        Raises:
            ReadOnlyError: that is so now.
        """
        if self.why:
            raise self.refusal()

    def refusal(self) -> ReadOnlyError:
        """What a request is refused with."""
        return ReadOnlyError(
            f"the controller is read-only, because its disk is full ({self.why}); "
            "training continues; free room there, and it takes requests again by itself",
            after_s=10.0,
        )

    def give_up_reserve(self) -> bool:
        """Make room for the last that was decided; whether there was any to give up."""
        return self._reserve is not None and self._reserve.release()

    def look_at_s(self, now_s: float) -> float:
        """When `has_ended` is to be asked again."""
        return max(now_s, self._look_s)

    def has_ended(self, now_s: float) -> bool:
        """Whether the journal can be written again; looked at now and then."""
        if now_s < self._look_s:
            return False
        self._look_s = now_s + LOOK_S
        if self._reserve is not None and not self._reserve.acquire():
            return False
        try:
            self._journal.probe()
        except DiskFullError:
            return False
        logger.warning("read-only mode ends: there is room for the journal again")
        self.why = ""
        self._on_change()
        return True
