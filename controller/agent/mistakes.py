"""Mistakes of the agent's observers: logged and counted, and the agent goes on without them.

What looks at workers and at the node reads what others write: black boxes, /proc, folders on
disks that fail. Only the line to the controller and the supervisor of workers are needed to
keep a node; nothing else may end them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# Shown from the start, so that the first mistake of each is already a rise.
PARTS = (
    "black box",
    "command",
    "heartbeat",
    "host",
    "links",
    "log export",
    "post-mortem",
    "pruning",
    "reporter",
    "standby",
    "stalls",
)
# The same mistake may be made at every look, five times a second: one line with its traceback
# a minute says it.
LOG_PERIOD_S = 60.0
_RESTART_FIRST_S = 0.5
_RESTART_MOST_S = 30.0
# One that worked for so long failed for another reason than at its start.
_HEALTHY_S = 60.0


class Mistakes:
    """How many there were, by the part of the agent that made them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = Counter[str]()
        self._logged_s: dict[str, float] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """By part."""
        return dict(self._counts)

    def note(self, part: str, what: str, error: BaseException) -> None:
        """Count a mistake of `part` with `what`; log it, unless `part` was in the log just now."""
        self._counts[part] += 1
        now_s = self._clock()
        if now_s - self._logged_s.get(part, -LOG_PERIOD_S) >= LOG_PERIOD_S:
            self._logged_s[part] = now_s
            number = self._counts[part]
            logger.error("%s failed (%d so far): %s: %r", part, number, what, error, exc_info=error)


async def keep_running(
    part: str, work: Callable[[], Coroutine[Any, Any, None]], mistakes: Mistakes
) -> None:
    """Do work that never ends by itself, again after a pause whenever it fails."""
    failures = 0
    while True:
        began_s = time.monotonic()
        try:
            await work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the node keeps its workers
            if time.monotonic() - began_s >= _HEALTHY_S:
                failures = 0
            delay_s = min(_RESTART_MOST_S, _RESTART_FIRST_S * 2.0**failures)
            failures = min(failures + 1, 10)
            mistakes.note(part, f"started again in {delay_s:g} s", error)
            await asyncio.sleep(delay_s)
