"""Whether a controller that keeps others off still lives, by what it renews in the database.

The leader counts up at every renewal. A controller that waits compares counts by its own clock, so
that no two clocks need agree; a count that has stood for the lease's length is that of a leader
that is frozen, or cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

LEASE_S = 15.0
"""Without a renewal for so long a leader is deposed, if another controller waits."""
RENEW_S = 2.0
STARTING_S = 300.0
"""The lease of a controller that has just taken over: it reads its journal before it renews."""
# Between two looks of one that waits. After a longer pause, what it saw before says nothing: it was
# frozen itself, or the database did not answer the leader either.
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What the leader wrote last."""

    holder: int
    """The session that wrote it."""
    renewals: int
    limit_s: float
    """It will be renewed within so many seconds."""


@dataclass(slots=True)
class LeaseWatch:
    """The looks of one controller that waits."""

    _last: Renewal | None = None
    _since_s: float = 0.0
    _looked_s: float = 0.0

    def is_over(self, seen: Renewal, now_s: float) -> bool:
        """Whether the leader has not renewed for its limit, as far as was looked."""
        is_first = self._last is None or now_s - self._looked_s > _LONGEST_PAUSE_S
        if is_first or seen != self._last:
            self._last, self._since_s = seen, now_s
        self._looked_s = now_s
        return now_s - self._since_s > seen.limit_s
