"""Putting the clocks of several nodes beside each other. Pure.

No member of a collective can end it before each of them has begun it. What two nodes say of the
beginnings and ends of their common collectives therefore bounds how far apart their clocks are,
from both sides, and the more closely the more often either of them came last. Clocks that may be
the same by these bounds are taken to be; else the middle between the bounds is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outlast.layout import Layout
from outlast.trace.ranks import Meeting, TracedRank, meeting_of


@dataclass(slots=True)
class _Part:
    """What a node says of one collective: when its last rank began, and when its first ended."""

    begun_ns: int
    ended_ns: int


@dataclass(slots=True)
class _Bounds:
    """By how much one node's clock is ahead of another's, at least and at most."""

    least_ns: int
    most_ns: int

    @property
    def likely_ns(self) -> int:
        if self.least_ns <= 0 <= self.most_ns:
            return 0
        return (self.least_ns + self.most_ns) // 2


def ahead_ns(ranks: Sequence[TracedRank], layout: Layout) -> dict[str, int]:
    """By how much the clock of each node is ahead of the first rank's node.

    0 for a node that no collective connects with it, not even through others.
    """
    bounds = _bounds(_parts(ranks, layout))
    ahead = {ranks[0].node: 0} if ranks else {}
    queue = deque(ahead)
    while queue:
        one = queue.popleft()
        for (start, other), found in bounds.items():
            if start == one and other not in ahead:
                ahead[other] = ahead[one] + found.likely_ns
                queue.append(other)
    return {rank.node: ahead.get(rank.node, 0) for rank in ranks}


def aligned(ranks: Sequence[TracedRank], ahead: Mapping[str, int]) -> list[TracedRank]:
    """The same by the clock of the first rank's node."""
    return [_shifted(rank, ahead[rank.node]) for rank in ranks]


def _parts(ranks: Sequence[TracedRank], layout: Layout) -> dict[Meeting, dict[str, _Part]]:
    parts: defaultdict[Meeting, dict[str, _Part]] = defaultdict(dict)
    for rank in ranks:
        for operation in rank.operations:
            meeting = meeting_of(rank, operation, layout)
            if meeting is None or not operation.is_over:
                continue
            own = _Part(operation.start_ns, operation.end_ns)
            part = parts[meeting].setdefault(rank.node, own)
            part.begun_ns = max(part.begun_ns, own.begun_ns)
            part.ended_ns = min(part.ended_ns, own.ended_ns)
    return parts


def _bounds(parts: Mapping[Meeting, Mapping[str, _Part]]) -> dict[tuple[str, str], _Bounds]:
    """Of the second node of each pair against the first."""
    bounds: dict[tuple[str, str], _Bounds] = {}
    for by_node in parts.values():
        for one, first in by_node.items():
            for other, second in by_node.items():
                if one == other:
                    continue
                least_ns = second.begun_ns - first.ended_ns
                most_ns = second.ended_ns - first.begun_ns
                known = bounds.setdefault((one, other), _Bounds(least_ns, most_ns))
                known.least_ns = max(known.least_ns, least_ns)
                known.most_ns = min(known.most_ns, most_ns)
    return bounds


def _shifted(rank: TracedRank, by_ns: int) -> TracedRank:
    if by_ns == 0:
        return rank
    return replace(
        rank,
        operations=tuple(
            replace(each, start_ns=each.start_ns - by_ns, end_ns=each.end_ns - by_ns)
            for each in rank.operations
        ),
        steps=tuple(
            replace(each, start_ns=each.start_ns - by_ns, end_ns=each.end_ns - by_ns)
            for each in rank.steps
        ),
        spans=tuple(
            replace(each, start_ns=each.start_ns - by_ns, end_ns=each.end_ns - by_ns)
            for each in rank.spans
        ),
        known_ns=None if rank.known_ns is None else rank.known_ns - by_ns,
    )
