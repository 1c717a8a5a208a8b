"""Putting the clocks of several nodes beside each other. Pure.

No member of a collective can end it before the part of each of them has left, which may be long
before that one waits for it. What two nodes say of the beginnings and ends of their common
collectives therefore bounds how far apart their clocks are, from both sides, and the more closely
the more often either of them came last. Clocks that may be the same by these bounds are taken to
be; else the middle between the bounds is.

Heartbeats bound the same from both sides (`KnownClock`), less closely as a rule. Where both are
there, both hold; a node that meets no other in a collective is put where heartbeats say. Where they
contradict each other the collectives are right: they are of the time that is looked at.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownClock:
    """A node's clock against the controller's, as heartbeats say."""

    ahead_ns: int
    error_ns: int


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

    def within(self, other: _Bounds | None) -> _Bounds:
        """Both together; these alone where they contradict each other."""
        if other is None:
            return self
        least_ns = max(self.least_ns, other.least_ns)
        most_ns = min(self.most_ns, other.most_ns)
        return self if least_ns > most_ns else _Bounds(least_ns, most_ns)


def ahead_ns(
    ranks: Sequence[TracedRank], layout: Layout, known: Mapping[str, KnownClock] | None = None
) -> dict[str, int]:
    """By how much the clock of each node is ahead of the first rank's node.

    `known` is what heartbeats say. 0 for a node that nothing connects with it: no collective, not
    even through others, and no heartbeat.
    """
    known = known or {}
    nodes: dict[str, None] = {}
    neighbours: defaultdict[str, dict[str, _Bounds]] = defaultdict(dict)
    for (one, other), found in _bounds(_parts(ranks, layout, nodes)).items():
        neighbours[one][other] = found.within(_known_bounds(one, other, known))
    ahead: dict[str, int] = {}
    for node in nodes:
        if node in ahead:
            continue
        ahead[node] = _by_heartbeats(node, ahead, known)
        queue = deque([node])
        while queue:
            one = queue.popleft()
            for other, found in neighbours[one].items():
                if other not in ahead:
                    ahead[other] = ahead[one] + found.likely_ns
                    queue.append(other)
    return ahead


def _by_heartbeats(node: str, ahead: Mapping[str, int], known: Mapping[str, KnownClock]) -> int:
    """Where a node is by heartbeats, beside the one of those placed that they know best."""
    placed = [each for each in ahead if each in known]
    if node not in known or not placed:
        return 0
    beside = min(placed, key=lambda each: known[each].error_ns)
    bounds = _known_bounds(beside, node, known)
    assert bounds is not None, "both are known"
    return ahead[beside] + bounds.likely_ns


def _known_bounds(one: str, other: str, known: Mapping[str, KnownClock]) -> _Bounds | None:
    """Of the second node against the first, by heartbeats."""
    if one not in known or other not in known:
        return None
    first, second = known[one], known[other]
    ahead_ns = second.ahead_ns - first.ahead_ns
    error_ns = first.error_ns + second.error_ns
    return _Bounds(ahead_ns - error_ns, ahead_ns + error_ns)


def aligned(ranks: Sequence[TracedRank], ahead: Mapping[str, int]) -> list[TracedRank]:
    """The same by the clock of the first rank's node."""
    return [_shifted(rank, ahead[rank.node]) for rank in ranks]


def _parts(
    ranks: Sequence[TracedRank], layout: Layout, nodes: dict[str, None]
) -> dict[Meeting, dict[str, _Part]]:
    """Of each collective; `nodes` are put down in the order of the ranks, which may be read from
    a file one by one."""
    parts: defaultdict[Meeting, dict[str, _Part]] = defaultdict(dict)
    for rank in ranks:
        nodes[rank.node] = None
        for operation in rank.operations:
            meeting = meeting_of(rank, operation, layout)
            if meeting is None or not operation.is_over:
                continue
            own = _Part(operation.begun_ns, operation.end_ns)
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
            replace(
                each,
                start_ns=each.start_ns - by_ns,
                end_ns=each.end_ns - by_ns,
                departed_ns=each.departed_ns and each.departed_ns - by_ns,
            )
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
