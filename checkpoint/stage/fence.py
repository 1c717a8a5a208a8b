"""The order in which other processes see what is stored in memory that they share."""

from __future__ import annotations

import threading

_LOCK = threading.Lock()


def fence() -> None:
    """Stores before this are seen before stores after it, on hosts with weak ordering (ARM) too.

    A release followed by an acquire of the same lock orders both sides; one pass alone would let
    stores of either side into its middle. It costs well under a microsecond.
    """
    with _LOCK:
        pass
    with _LOCK:
        pass
