"""Events that the controller has not acknowledged yet.

Whatever must reach the controller gets a sequence number and stays until the
controller acknowledges it. The buffer is bounded; when it is full the oldest
step reports go first, then the oldest progress, then whatever is oldest.
Dropping leaves gaps in the sequence, which the controller allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


class Weight(IntEnum):
    """How much an event matters when not all can be kept: the lightest go first."""

    STEPS = 0
    PROGRESS = 1
    LASTING = 2


@dataclass(frozen=True, slots=True)
class Buffered(Generic[Payload]):
    """An event that is not acknowledged yet."""

    seq: int
    payload: Payload


class EventBuffer(Generic[Payload]):
    """Events in order, numbered from 1, kept until acknowledged or crowded out."""

    def __init__(self, max_events: int) -> None:
        if max_events < 1:
            raise ValueError(f"max_events is {max_events}; it must be 1 or more")
        self._max_events = max_events
        self._next_seq = 1
        self._by_weight: dict[Weight, dict[int, Payload]] = {weight: {} for weight in Weight}
        self.num_dropped = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_weight.values()))

    @property
    def last_seq(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._next_seq - 1

    def add(self, payload: Payload, weight: Weight) -> int:
        """Number an event and keep it; may drop an older, lighter one."""
        seq = self._next_seq
        self._next_seq += 1
        self._by_weight[weight][seq] = payload
        if len(self) > self._max_events:
            lightest = next(events for events in self._by_weight.values() if events)
            del lightest[next(iter(lightest))]
            self.num_dropped += 1
        return seq

    def replace(self, seq: int, payload: Payload, weight: Weight) -> bool:
        """Put another payload in the place of an event; False when it is not kept any more."""
        events = self._by_weight[weight]
        if seq not in events:
            return False
        events[seq] = payload
        return True

    def acknowledge(self, seq: int) -> None:
        """Forget every event up to and including `seq`. Old and repeated ones are harmless.

        A number that was never given out belongs to another incarnation of the agent.
        """
        if seq > self.last_seq:
            return
        for events in self._by_weight.values():
            while events and (oldest := next(iter(events))) <= seq:
                del events[oldest]

    def keeps(self, seq: int) -> bool:
        """Whether an event is neither acknowledged nor crowded out."""
        return any(seq in events for events in self._by_weight.values())

    def after(self, seq: int) -> list[Buffered[Payload]]:
        """The events kept with a number greater than `seq`, in order."""
        found: list[Buffered[Payload]] = []
        for events in self._by_weight.values():
            # From the newest back, so that sending one new event costs one look.
            for number in reversed(events):
                if number <= seq:
                    break
                found.append(Buffered(number, events[number]))
        if len(found) > 1:
            found.sort(key=lambda event: event.seq)
        return found
