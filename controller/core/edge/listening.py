"""When nodes may be judged silent: not before what they said while we did not listen is read.

However often we were busy, judging is put off by a few seconds at most: what keeps the loop busy
must not keep failures from being found.
"""

from __future__ import annotations

# A turn that begins so late means that we were not listening: nobody is called silent
# before what has arrived meanwhile is read.
PAUSE_S = 0.5
LISTEN_AFTER_PAUSE_S = 1.0
# However often that happens, nodes are judged so long after the first of such pauses.
JUDGE_WITHIN_S = 5.0


class Listening:
    """The pauses of the loop, by the monotonic clock."""

    def __init__(self) -> None:
        # From then on nodes are judged.
        self.judge_after_s = 0.0
        # Since when judging is put off, None while it is not; and whether we were away for
        # longer than it may be, which is no reason to judge before listening.
        self._put_off_since_s: float | None = None
        self._was_away = False

    def may_judge(self, now_s: float) -> bool:
        """Whether what has arrived during pauses has been read by now."""
        if now_s < self.judge_after_s:
            return False
        self._put_off_since_s = None
        self._was_away = False
        return True

    def note_pause(self, then_s: float, now_s: float) -> None:
        """Between these two moments we did not listen."""
        pause_s = now_s - then_s
        if pause_s <= PAUSE_S:
            return
        is_away = pause_s > JUDGE_WITHIN_S
        if self._put_off_since_s is None or (is_away and not self._was_away):
            self._put_off_since_s = now_s
            self._was_away = is_away
        latest_s = self._put_off_since_s + JUDGE_WITHIN_S
        self.judge_after_s = min(now_s + LISTEN_AFTER_PAUSE_S, latest_s)

    def begin_anew(self, now_s: float) -> None:
        """Nothing was read for long: what has arrived comes first."""
        self.judge_after_s = now_s + LISTEN_AFTER_PAUSE_S
