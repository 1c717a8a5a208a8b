"""Silence turned into events: the table that keeps healthy heartbeats from the machine.

The edge calls `heard` for every message of an agent and `expire` now and then;
what comes out are changes only. Both take the time from the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from controller.core.edge.due import DueQueue
from controller.core.node_events import NodeHeard, NodeLate, NodeLost, NodeSilent
from outlast.ids import NodeId

# Nodes due within so long are looked at together: those of a large fleet, nearly all of which have
# been heard meanwhile, must not wake anybody one by one.
_TOGETHER_S = 1.0

LivenessEvent = NodeHeard | NodeLate | NodeLost | NodeSilent


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a silence may last, in seconds."""

    late_s: float = 6.0
    lost_s: float = 15.0
    silent_s: float = 60.0

    def is_shorter_than(self, other: Limits) -> bool:
        """Whether a silence that `other` allows may be too long now."""
        return (
            self.late_s < other.late_s
            or self.lost_s < other.lost_s
            or self.silent_s < other.silent_s
        )


class _Level(IntEnum):
    HEARD = 0
    LATE = 1
    LOST = 2
    SILENT = 3


@dataclass(slots=True)
class _Entry:
    heard_s: float
    level: _Level
    limits: Limits
    # Since when these limits hold; an agent that was ordered to send more often from now on
    # must not be late by what it was allowed before.
    limited_s: float

    @property
    def counted_s(self) -> float:
        """From when silence counts against the limits."""
        return max(self.heard_s, self.limited_s)

    def next_s(self) -> float:
        """When it crosses its next limit, if nothing is heard until then."""
        limits = self.limits
        match self.level:
            case _Level.HEARD:
                return self.counted_s + limits.late_s
            case _Level.LATE:
                return self.counted_s + limits.lost_s
            case _Level.LOST:
                return self.counted_s + limits.silent_s
            case _Level.SILENT:
                return math.inf


class LivenessTable:
    """Who was heard when."""

    def __init__(self) -> None:
        self._entries: dict[NodeId, _Entry] = {}
        self._due: DueQueue[NodeId] = DueQueue()

    def expect(self, node: NodeId, now_s: float, limits: Limits) -> None:
        """Start watching a node as if it had been heard now, or change its limits.

        Where a limit becomes shorter, silence counts from now.
        """
        entry = self._entries.get(node)
        if entry is None:
            entry = _Entry(heard_s=now_s, level=_Level.HEARD, limits=limits, limited_s=now_s)
            self._entries[node] = entry
        elif entry.limits == limits:
            return
        elif limits.is_shorter_than(entry.limits):
            entry.limited_s = now_s
        entry.limits = limits
        self._look_again(node, entry)

    def forget(self, node: NodeId) -> None:
        """Stop watching a node."""
        self._entries.pop(node, None)
        self._due.forget(node)

    def heard(self, node: NodeId, now_s: float) -> list[LivenessEvent]:
        """A message arrived."""
        entry = self._entries.get(node)
        if entry is None:
            return []
        entry.heard_s = max(entry.heard_s, now_s)
        if entry.level is _Level.HEARD:
            return []
        entry.level = _Level.HEARD
        self._look_again(node, entry)
        return [NodeHeard(node=node)]

    def heard_s(self, node: NodeId) -> float | None:
        """When a node was last heard, if it is being watched."""
        entry = self._entries.get(node)
        return None if entry is None else entry.heard_s

    def due_s(self, node: NodeId) -> float | None:
        """When a node crosses its next limit, if nothing is heard until then."""
        entry = self._entries.get(node)
        next_s = math.inf if entry is None else entry.next_s()
        return None if math.isinf(next_s) else next_s

    def is_late(self, node: NodeId) -> bool:
        """Whether a node was reported late, or worse, and has been silent since."""
        entry = self._entries.get(node)
        return entry is not None and entry.level is not _Level.HEARD

    def expire(self, now_s: float) -> list[LivenessEvent]:
        """Nodes that have crossed a limit since the last call; each limit is reported once."""
        next_s = self._due.next_s()
        if next_s is None or now_s < next_s:
            return []
        events: list[LivenessEvent] = []
        # All at once: one that is put back may be due within that time again.
        for node in list(self._due.take(now_s + _TOGETHER_S)):
            entry = self._entries[node]
            silent_s = now_s - entry.heard_s
            while entry.next_s() <= now_s:
                entry.level = _Level(entry.level + 1)
                events.append(_EVENTS[entry.level](node=node, silent_s=silent_s))
            self._look_again(node, entry)
        return events

    def next_expiry_s(self) -> float | None:
        """When `expire` is to be called next: somebody may be due then, nobody before."""
        return self._due.next_s()

    def _look_again(self, node: NodeId, entry: _Entry) -> None:
        next_s = entry.next_s()
        if not math.isinf(next_s):
            self._due.put(node, next_s)


_EVENTS: dict[_Level, type[NodeLate | NodeLost | NodeSilent]] = {
    _Level.LATE: NodeLate,
    _Level.LOST: NodeLost,
    _Level.SILENT: NodeSilent,
}
