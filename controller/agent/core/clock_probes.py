"""When a heartbeat asks the controller for its clock: often at first, then now and then.

The first few make the estimate good within seconds of a session's beginning; later ones follow
the drift of clocks, at a cost that ten thousand nodes together do not notice.

Where another controller may take over, answers are also how an agent learns that the present one is
frozen: its kernel goes on acknowledging what is sent.
"""

from __future__ import annotations

# As many as the controller keeps.
NUM_AT_FIRST = 8
# A quarter of a millisecond is what clocks may drift in it (RFC 5905, PHI of 15 ppm).
PERIOD_S = 16.0
# Where there is another controller to turn to: both together less than a lease, so that agents ask
# the other one by the time it leads.
WATCHING_PERIOD_S = 4.0
ANSWER_LIMIT_S = 10.0


class ClockProbes:
    """What was asked in the present session."""

    def __init__(self, *, watches: bool = False) -> None:
        """`watches`: there is another controller to turn to."""
        self._watches = watches
        self._num_asked = 0
        self._asked_s = 0.0
        self._waits_since_s: float | None = None
        # An older controller does not answer.
        self._has_answered = False

    def began(self) -> None:
        """A session begins."""
        self._num_asked = 0
        self._waits_since_s = None
        self._has_answered = False

    def answered(self) -> None:
        """The controller has answered."""
        self._waits_since_s = None
        self._has_answered = True

    def is_unanswered(self, now_s: float) -> bool:
        """Whether the controller that answered before has not for too long."""
        since_s = self._waits_since_s
        is_late = since_s is not None and now_s - since_s > ANSWER_LIMIT_S
        return self._watches and self._has_answered and is_late

    def is_due(self, now_s: float) -> bool:
        """Whether the heartbeat that is sent now asks; it is taken to do so then."""
        period_s = WATCHING_PERIOD_S if self._watches else PERIOD_S
        if self._num_asked >= NUM_AT_FIRST and now_s - self._asked_s < period_s:
            return False
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        self._num_asked += 1
        self._asked_s = now_s
        return True
