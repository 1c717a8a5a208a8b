"""Which ends of processes a count of kills for want of memory explains.

The kernel counts whom it kills for want of memory, of a memory cgroup or of the whole node,
and says there neither whom nor when. So a rise explains one end by SIGKILL and no more, of a
process that was there when it came, and not for long: the next one may have been somebody's
wish.

What does not belong here: where the count is read, and who else may have sent the signal.
"""

from __future__ import annotations

from collections import deque

# The kernel counts before it kills, and an end is heard once the memory is given back: 0.25 s
# per GB in a small virtual machine, so a minute for 250 GB of a worker; and as much again.
EXPLAINS_FOR_S = 120.0
# So many ends at once are no longer those of a node's workers.
_MAX_RISES = 1_000


class KillCount:
    """A count that was looked at again and again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._rises: deque[float] = deque(maxlen=_MAX_RISES)

    def look(self, count: int, now_s: float) -> None:
        """Take in what the count is now."""
        self._rises.extend([now_s] * min(_MAX_RISES, max(0, count - self.count)))
        self.count = count
        while self._rises and self._rises[0] < now_s - EXPLAINS_FOR_S:
            self._rises.popleft()

    def explains(self, since_s: float) -> bool:
        """Whether it rose after `since_s` for nothing that was explained before."""
        while self._rises:
            if self._rises.popleft() > since_s:
                return True
        return False
