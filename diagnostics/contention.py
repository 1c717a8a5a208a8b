"""How much tasks on this machine waited for a CPU, so that a slow value can be understood."""

from __future__ import annotations

import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")


class Contention:
    """Share of the time since its creation in which some task had no CPU.

    Read from the kernel's pressure stall information. Where there is none the
    share reads 0.0, and a slow value counts as what it seems.
    """

    def __init__(self) -> None:
        self._stalled_us = _stalled_us()
        self._started_s = time.monotonic()

    def ratio(self) -> float:
        """The share, from 0.0 to 1.0."""
        elapsed_us = (time.monotonic() - self._started_s) * 1e6
        if elapsed_us <= 0:
            return 0.0
        return min(1.0, max(0.0, (_stalled_us() - self._stalled_us) / elapsed_us))


def _stalled_us() -> int:
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return 0
    return int(some.rpartition("total=")[2])
