"""When a heartbeat asks the controller for its clock: often at first, then now and then.

The first few make the estimate good within seconds of a session's beginning; later ones follow
the drift of clocks, at a cost that ten thousand nodes together do not notice.
"""

from __future__ import annotations

# As many as the controller keeps.
NUM_AT_FIRST = 8
# A quarter of a millisecond is what clocks may drift in it (RFC 5905, PHI of 15 ppm).
PERIOD_S = 16.0


class ClockProbes:
    """What was asked in the present session."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._asked_s = 0.0

    def began(self) -> None:
        """A session begins."""
        self._num_asked = 0

    def is_due(self, now_s: float) -> bool:
        """Whether the heartbeat that is sent now asks; it is taken to do so then."""
        if self._num_asked >= NUM_AT_FIRST and now_s - self._asked_s < PERIOD_S:
            return False
        self._num_asked += 1
        self._asked_s = now_s
        return True
