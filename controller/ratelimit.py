"""Logs that a peer can provoke as often as it likes, kept to a line a minute of each kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0
# Kinds that are counted apart; a peer must not make us remember more.
MAX_KINDS = 1_024


class RateLimitedLog:
    """A logger's front: the first line of each kind at once, then one a minute with a count."""

    def __init__(
        self, logger: logging.Logger, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._monotonic = monotonic
        # By kind, when the last line was logged and how many were held back since.
        self._kinds: dict[tuple[str, ...], tuple[float, int]] = {}

    def warning(self, kind: tuple[str, ...], text: str, *args: object) -> None:
        """Log a line, unless one of this kind was logged within the last minute."""
        now_s = self._monotonic()
        last_s, held_back = self._kinds.get(kind, (float("-inf"), 0))
        if now_s - last_s < PERIOD_S:
            self._kinds[kind] = (last_s, held_back + 1)
            return
        if len(self._kinds) >= MAX_KINDS:
            self._kinds = {
                each: seen for each, seen in self._kinds.items() if now_s - seen[0] < PERIOD_S
            }
        if len(self._kinds) < MAX_KINDS:
            self._kinds[kind] = (now_s, 0)
        more = f" ({held_back} more since the last such line)" if held_back else ""
        self._logger.warning(text + "%s", *args, more)
