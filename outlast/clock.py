"""The seams through which time enters.

A controller's time is a `Clock`, so that the simulator can own it. The processes of a node
share another one: they note moments in files that the others read, and compare them. That
*node time* is the kernel's monotonic clock, which is the same in all of them, put at the
moment where the wall clock was when the agent began. NTP or a person may set the wall clock
while they run: no age, duration or order on the node changes with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Protocol

# Nanoseconds from the monotonic clock to node time: an agent's, for what it starts.
_OFFSET_VARIABLE = "OUTLAST_CLOCK_OFFSET_NS"


class Clock(Protocol):
    """Wall-clock seconds since the Unix epoch."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        return time.time()


def node_time_ns() -> int:
    """Nanoseconds since the Unix epoch, by the clock that all processes of this node share."""
    return time.monotonic_ns() + _offset_ns


def node_time_s() -> float:
    """`node_time_ns` in seconds."""
    return node_time_ns() / 1e9


def wall_ahead_s() -> float:
    """How far the wall clock was set forward (or back) since the agent of this node began."""
    return (time.time_ns() - node_time_ns()) / 1e9


def node_clock_environment() -> Mapping[str, str]:
    """What gives a child process the node time of this one."""
    return {_OFFSET_VARIABLE: str(_offset_ns)}


def _given_offset_ns() -> int:
    given = os.environ.get(_OFFSET_VARIABLE, "")
    try:
        return int(given)
    except ValueError:
        # The first process of a node, or one by itself.
        return time.time_ns() - time.monotonic_ns()


_offset_ns = _given_offset_ns()
