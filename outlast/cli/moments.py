"""Moments as people write them: so long ago, or a date with a time."""

from __future__ import annotations

import re
from datetime import datetime

ALLOWED = (
    "a length of time that has passed, such as 90s, 10m, 2h or 1d, or a local time such as "
    "2026-03-31T18:30"
)
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def moment_s(text: str, now_s: float, name: str) -> float:
    """Seconds since the epoch; `name` is the option that has the text.

    Raises:
        ValueError: it is neither, or lies ahead.
    """
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            at_s = now_s - float(ago.group(1)) * _UNITS_S[ago.group(2)]
        else:
            at_s = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"{name} is {text!r}; allowed: {ALLOWED}") from error
    if at_s > now_s:
        raise ValueError(f"{name} is {text!r}, which lies ahead; allowed: {ALLOWED}")
    # Before the epoch is everything.
    return max(at_s, 1.0)
