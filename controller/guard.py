"""Keeps what only observes from ending the controller.

A mistake in the tables at the edge, in an effect or in a log line costs that look or that
effect, not the service: it is logged with its stack, at most once a minute for each part,
and counted for the alert. What decides and what is durable does not run in here.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from controller.ratelimit import RateLimitedLog

logger = logging.getLogger(__name__)

# Known beforehand, so that the first error of each is already a rise.
PARTS = ("watch", "effects", "log", "retention", "notifications")

_Result = TypeVar("_Result")


class Guard:
    """Counts errors of observers, by part of the controller."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._log = RateLimitedLog(logger)

    def call(
        self, part: str, default: _Result | None, call: Callable[[], _Result]
    ) -> _Result | None:
        """What `call` gives, or `default` when it fails."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever it is, the rest continues
            self.note(part, error)
            return default

    def note(self, part: str, error: BaseException) -> None:
        """An observer made a mistake."""
        self.counts[part] += 1
        self._log.warning(
            (part, type(error).__name__),
            "internal error, the rest of the controller continues: part=%s\n%s",
            part,
            "".join(traceback.format_exception(error)),
        )
