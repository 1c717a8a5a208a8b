"""Events on which a turn of the machine failed: marked in the journal, and skipped once.

After such a turn nothing in memory is trusted: the machine is built anew from the journal,
as after a restart of the process, and agents say again what is true on their nodes. An
agent that provokes this again and again is refused for a while. When turns fail whatever
the event is, the state itself is at fault, and the controller ends, as it must.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable

from controller.core.events import Event
from controller.store.database import DiskFullError
from controller.store.journal import Journal
from outlast.errors import FatalError, RetryableError

logger = logging.getLogger(__name__)

WINDOW_S = 600.0
# Poisoned events of one node in a window, after which it is refused until the window is over.
MAX_OF_NODE = 3
# Of all in a window: more than some node or user provokes by one mistake of ours.
MAX_OF_ALL = 16
_MAX_EVENT_CHARS = 4_000
_MAX_ERROR_CHARS = 16_000


class PoisonedError(FatalError):
    """The controller failed on this very request and skipped it."""


class NodeRefusedError(RetryableError):
    """The node's messages have made turns fail lately."""


class Poison:
    """What was skipped, and who sent it."""

    def __init__(
        self, journal: Journal, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_marked = 0
        self._journal = journal
        self._monotonic = monotonic
        # Sent again, it must not be handled again: neither now nor by the next controller.
        self._known = set(journal.poisoned_sources())
        self._times: deque[tuple[float, str]] = deque()

    def is_known(self, source: str) -> bool:
        """Whether a message from `source` (node/incarnation/number) is to be skipped."""
        return source in self._known

    def check_node(self, node: str) -> None:
        """Let a node connect.

        Raises:
            NodeRefusedError: not for a while.
        """
        self._forget_old()
        times = [at_s for at_s, source in self._times if source.partition("/")[0] == node]
        if len(times) >= MAX_OF_NODE:
            after_s = times[0] + WINDOW_S - self._monotonic()
            raise NodeRefusedError(
                f"node {node}: {len(times)} of its messages made the controller fail within "
                f"{WINDOW_S:.0f} s (its log says how, after `poisoned event`); refused for "
                f"{after_s:.0f} s more",
                after_s=after_s,
            )

    def mark(self, event: Event, source: str, error: Exception) -> None:
        """Journal that an event is to be skipped.

        Raises:
            Exception: `error`, when turns fail so often that the events cannot be the reason.
        """
        self._forget_old()
        if len(self._times) >= MAX_OF_ALL:
            raise error
        self._times.append((self._monotonic(), source))
        what = "".join(traceback.format_exception(error))
        logger.error("poisoned event, skipped: source=%s event=%.500r\n%s", source, event, what)
        try:
            self._journal.mark_poisoned(
                source, repr(event)[:_MAX_EVENT_CHARS], what[-_MAX_ERROR_CHARS:]
            )
        except DiskFullError:
            logger.warning("the mark could not be journalled; only this controller knows of it")
        if source:
            self._known.add(source)
        self.num_marked += 1

    def _forget_old(self) -> None:
        while self._times and self._times[0][0] < self._monotonic() - WINDOW_S:
            self._times.popleft()
