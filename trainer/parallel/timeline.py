"""When work is done, by the clock of whoever does it: the host, or a device behind it.

On a CPU a call returns when its work is done, so a moment is known at once. On CUDA a
call only gives work to the device: the host's clock would measure how fast work is
given. There a moment is an event in the device's stream. It is read when the device has
passed it, in the order of the stream, and the host waits for none of them before it
needs a number from the device anyway. Who asks for a moment gives a function that takes
it, so both kinds run the same code, one of them later.

What does not belong here: what the moments mean (`comm.py`, `pipeline.py`, the meter).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from outlast.clock import node_time_ns
from outlast.errors import RetryableError

# Takes a moment, in nanoseconds.
Note = Callable[[int], None]
# Of looking at a device that is waited for with a limit: only a job that ends does so.
_POLL_S = 0.001


class DeviceSilentError(RetryableError):
    """The device did not come to the end of its work."""


class Timeline(Protocol):
    """Moments of one rank's work, in the order in which it is given."""

    @property
    def is_async(self) -> bool:
        """Moments are known later."""
        ...

    @property
    def is_waited_for(self) -> bool:
        """The host stands still until the device has done what it was given."""
        ...

    def forget(self) -> None:
        """Of moments that are still to come nobody wants to know."""

    def stamp(self, note: Note) -> None:
        """Let `note` have the moment at which all work given so far is done, in node time."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Return once that moment has come, and every note has its own.

        Raises:
            DeviceSilentError: it has not, in so many seconds.
        """


class HostTimeline:
    """Work is done when it is given."""

    is_async = False
    is_waited_for = False

    def forget(self) -> None:
        """None is still to come."""

    def stamp(self, note: Note) -> None:
        note(node_time_ns())

    def finish(self, timeout_s: float | None = None) -> None:
        """Nothing to wait for."""


class Event(Protocol):
    """A place in the device's stream, as `torch.cuda.Event`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceTimeline:
    """Moments are events in the stream that work is given to."""

    is_async = True

    def __init__(self, new_event: Callable[[], Event]) -> None:
        """`new_event` makes events that have the time, in the stream that is current then."""
        self.is_waited_for = False
        self._new_event = new_event
        self._spare: list[Event] = []
        self._pending: deque[tuple[Event, Note]] = deque()
        self._known = new_event()
        self.forget()

    def forget(self) -> None:
        self.is_waited_for = False
        self._pending.clear()
        self._known.record()
        self._known.synchronize()
        self._known_ns = node_time_ns()

    def stamp(self, note: Note) -> None:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._pending.append((event, note))
        while self._pending and self._pending[0][0].query():
            self._pass()

    def finish(self, timeout_s: float | None = None) -> None:
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.is_waited_for = True
        self.stamp(_ignore)
        while self._pending:
            # One by one: the notes say how far the device has come, should it come no further.
            _wait(self._pending[0][0], limit_s)
            self._pass()
        self.is_waited_for = False
        # The device has a clock of its own: begin again from the host's, or they drift apart.
        self._known_ns = node_time_ns()

    def _pass(self) -> None:
        """The device has passed the oldest event."""
        event, note = self._pending.popleft()
        # From one to the next: of a long time the milliseconds, a float, would be coarse.
        self._known_ns += round(self._known.elapsed_time(event) * 1e6)
        self._spare.append(self._known)
        self._known = event
        note(self._known_ns)


def timeline_of(device: torch.device) -> Timeline:
    """The timeline of a rank that computes on `device`, which is the current one."""
    if device.type == "cuda":
        # torch's stubs leave events untyped.
        return DeviceTimeline(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    return HostTimeline()


@contextmanager
def timed(timeline: Timeline, add: Note) -> Iterator[None]:
    """Let `add` have how long what is inside takes, in nanoseconds."""
    since_ns = 0

    def begin(now_ns: int) -> None:
        nonlocal since_ns
        since_ns = now_ns

    timeline.stamp(begin)
    yield
    timeline.stamp(lambda now_ns: add(now_ns - since_ns))


def _wait(event: Event, limit_s: float | None) -> None:
    if limit_s is None:
        event.synchronize()
        return
    while not event.query():
        if time.monotonic() > limit_s:
            raise DeviceSilentError(
                "the device has not ended what it was given; the black box says where it stands"
            )
        time.sleep(_POLL_S)


def _ignore(now_ns: int) -> None:
    """Nobody asked for this moment."""
