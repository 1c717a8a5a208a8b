"""What agents send passes the gate of `controller.core.edge`; here is counted what did not.

What was left out or corrected is counted by reason and logged, at most a line a minute for
each node and reason.
"""

from __future__ import annotations

import logging
from collections import Counter

from controller.core.changes import State
from controller.core.edge.gate import Gate
from controller.core.edge.rules import Reason
from controller.ratelimit import RateLimitedLog
from outlast.ids import NodeId

logger = logging.getLogger(__name__)

DROPPED, CORRECTED = "dropped", "corrected"


class Incoming(Gate):
    """Checks the messages of every agent, and counts what it dropped and corrected."""

    def __init__(self, state: State) -> None:
        super().__init__(state, self)
        self._log = RateLimitedLog(logger)
        # By what was done and why.
        self.counts: Counter[tuple[str, Reason]] = Counter()

    def dropped(self, node: NodeId, reason: Reason, where: str) -> None:
        """Note that something was left out."""
        self._count(DROPPED, node, reason, where)

    def corrected(self, node: NodeId, reason: Reason, where: str) -> None:
        """Note that a value was replaced by a harmless one."""
        self._count(CORRECTED, node, reason, where)

    def clock_is_off(self, node: NodeId, offset_s: float) -> None:
        """Note that the clock of a node is corrected for."""
        self._log.warning(
            (node, "clock"),
            "node clock is off and corrected for: node=%s by_s=%.1f",
            node,
            -offset_s,
        )

    def _count(self, what: str, node: NodeId, reason: Reason, where: str) -> None:
        self.counts[what, reason] += 1
        self._log.warning(
            (node, what, reason),
            "report %s: node=%s reason=%s field=%s",
            what,
            node,
            reason,
            where,
        )
