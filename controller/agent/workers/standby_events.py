"""What comes from a standby process: news for the supervisor, and what a request comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outlast.errors import RetryableError


class StandbyError(RetryableError):
    """The standby process could not fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A process that has just come to life."""

    pid: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEvents:
    """What the supervisor wants to hear."""

    started: Callable[[], None]
    """A standby process was started; its pid is new."""
    died: Callable[[], None]
    """It is gone; workers go on."""
    exited: Callable[[str, int], None]
    """A worker (key) ended with a wait status."""
    running: Callable[[], Iterable[tuple[str, int]]]
    """Workers (key, pid) that live now, for a new standby to take over."""
