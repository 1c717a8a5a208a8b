"""The controller's clock: the machine's steady time, read from the clocks of this host."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from controller.core.edge.timebase import TimeBase

logger = logging.getLogger(__name__)


class SteadyClock:
    """Wall-clock seconds that no step of the wall clock moves at once."""

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._base = TimeBase(wall(), monotonic())

    def now_s(self) -> float:
        """The time in which everything is decided and noted."""
        base = self._base
        before = base.num_steps
        now_s = base.advance(self._wall(), self._monotonic())
        if base.num_steps > before:
            logger.warning(
                "alert: the wall clock stepped by %+.1f s; deadlines follow the monotonic clock, "
                "and times that are noted differ from the wall clock by %+.1f s for a while",
                base.last_step_s,
                -base.offset_s,
            )
        return now_s

    @property
    def num_steps(self) -> int:
        """Steps of the wall clock since the controller began."""
        return self._base.num_steps

    @property
    def offset_s(self) -> float:
        """How far the wall clock is ahead of the time in which things are decided."""
        return self._base.offset_s
