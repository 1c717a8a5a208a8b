"""The seam through which time enters, so that the simulator can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock seconds since the Unix epoch."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        return time.time()
