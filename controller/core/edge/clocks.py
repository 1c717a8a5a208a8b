"""By how much each node's clock is ahead of the controller's, from the round trips of heartbeats.

The node notes when it asks and when the answer is there, the controller when it was asked and when
it answers. What lies between on the way is split evenly; how it is split in truth is unknown, so
half of it is the error, and of the last few round trips the one with the smallest error holds.
An error grows with age, since no clock goes at exactly another's pace.

Source: RFC 5905, section 8 (offset and delay) and section 10 (clock filter).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from outlast.ids import NodeId
from outlast.v1 import agents_pb2

# RFC 5905: NSTAGE, and PHI, the frequency tolerance of a clock.
NUM_SAMPLES = 8
DRIFT_S_PER_S = 15e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A node's clock against the controller's."""

    ahead_s: float
    """Negative when it is behind."""
    error_s: float
    """The true value is at most so far away."""


@dataclass(frozen=True, slots=True)
class _Sample:
    ahead_s: float
    error_s: float
    # By the clock of the caller.
    at_s: float

    def error_at(self, now_s: float) -> float:
        """The error by now; both clocks drift."""
        return self.error_s + 2 * DRIFT_S_PER_S * max(0.0, now_s - self.at_s)


class ClockTable:
    """The last round trips of each node."""

    def __init__(self) -> None:
        self._samples: dict[NodeId, deque[_Sample]] = {}

    def began(self, node: NodeId) -> None:
        """A session begins, perhaps of an agent whose clock was put anew."""
        self.forget(node)

    def forget(self, node: NodeId) -> None:
        """Drop what is known of a node."""
        self._samples.pop(node, None)

    def heard(self, node: NodeId, trip: agents_pb2.ClockRoundTrip, now_s: float) -> None:
        """A round trip that has ended; one that cannot have been so is left out."""
        away_ns = trip.returned_ns - trip.sent_ns
        here_ns = trip.answered_ns - trip.received_ns
        if not 0 <= here_ns <= away_ns or not trip.sent_ns:
            return
        behind_ns = (trip.received_ns - trip.sent_ns) + (trip.answered_ns - trip.returned_ns)
        sample = _Sample(-behind_ns / 2e9, (away_ns - here_ns) / 2e9, now_s)
        self._samples.setdefault(node, deque(maxlen=NUM_SAMPLES)).append(sample)

    def reading(self, node: NodeId, now_s: float) -> ClockReading | None:
        """What is known of a node's clock by now; None without a round trip."""
        return _best(self._samples.get(node, ()), now_s)


def _best(samples: Iterable[_Sample], now_s: float) -> ClockReading | None:
    best = min(samples, key=lambda sample: sample.error_at(now_s), default=None)
    if best is None:
        return None
    return ClockReading(ahead_s=best.ahead_s, error_s=best.error_at(now_s))
