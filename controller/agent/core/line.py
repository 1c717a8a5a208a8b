"""The line to the controller: what it has not heard yet, and since when there is none.

Every welcome begins a new session, in which all that was not acknowledged is sent
again; the controller drops what it knows. Of the progress that an attempt reports while
there is no session only the newest is kept: nobody asks when the steps before it were.
Without a controller for longer than the limit the agent gives its workers up, once, so
that nothing is orphaned for ever.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic

from controller.agent.core.buffer import Buffered, EventBuffer, Payload, Weight

# Until the controller says otherwise.
DEFAULT_ABSENCE_LIMIT_S = 1800.0


class Line(Generic[Payload]):
    """Events on their way to the controller, and its absence."""

    def __init__(self, buffer: EventBuffer[Payload], *, now_s: float) -> None:
        self.buffer = buffer
        self.is_connected = False
        self.absence_limit_s = DEFAULT_ABSENCE_LIMIT_S
        self._give_up_s = now_s + self.absence_limit_s
        # In this session.
        self._sent_seq = 0
        # The newest progress of each attempt that was never sent.
        self._progress: dict[Hashable, int] = {}

    def welcomed(self) -> None:
        """A session has begun."""
        self.is_connected = True
        self._give_up_s = math.inf
        self._sent_seq = 0

    def lost(self, now_s: float) -> None:
        """The session has ended, if there was one."""
        if self.is_connected:
            self.is_connected = False
            self._give_up_s = now_s + self.absence_limit_s

    def gives_up(self, now_s: float) -> bool:
        """Whether the controller has been away for too long; once for each absence."""
        if now_s < self._give_up_s:
            return False
        self._give_up_s = math.inf
        return True

    def wake_at(self) -> float:
        """When `gives_up` will be true; infinite while there is a session."""
        return self._give_up_s

    def add(self, payload: Payload, weight: Weight, attempt: Hashable = None) -> int:
        """Keep an event until it is acknowledged; its number.

        Progress of an `attempt` takes the place of an older one that was never sent.
        """
        if weight is not Weight.PROGRESS or attempt is None:
            return self.buffer.add(payload, weight)
        older = self._progress.get(attempt)
        if older is not None and self.buffer.replace(older, payload, weight):
            return older
        seq = self.buffer.add(payload, weight)
        self._progress[attempt] = seq
        return seq

    def take_unsent(self) -> list[Buffered[Payload]]:
        """The events to send now, in order; none of them again in this session."""
        if not self.is_connected:
            return []
        events = self.buffer.after(self._sent_seq)
        if events:
            self._sent_seq = events[-1].seq
            self._progress.clear()
        return events

    def acknowledged(self, seq: int) -> None:
        """The controller has events up to this one."""
        self.buffer.acknowledge(seq)
