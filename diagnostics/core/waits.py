"""For whom each rank waits, and whether some wait for each other in a circle.

Ranks that wait in one operation of one group wait for the same members. They share one tuple
of them, so that the work grows with the ranks of a job and not with pairs of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diagnostics.core.rank_facts import POINT_TO_POINT, RankFacts
from outlast.blackbox.records import Group, Op

# By rank, the ranks that it cannot go on without, in group order.
Waits = Mapping[int, tuple[int, ...]]


def waits_of(facts: Mapping[int, RankFacts], waiting: Sequence[int]) -> Waits:
    """The ranks that each of the waiting ones cannot go on without."""
    found: dict[int, tuple[int, ...]] = {}
    # By group, its members and the operation's number: the members that have not entered that.
    behind: dict[tuple[Group, int, int], tuple[int, ...]] = {}
    for rank in waiting:
        waiter = facts[rank]
        if waiter.op in POINT_TO_POINT:
            found[rank] = _peers_missing(waiter, facts)
            continue
        group, members = waiter.group, waiter.members.get(waiter.group, ())
        key = (group, id(members), waiter.seq)
        if key not in behind:
            behind[key] = tuple(
                member
                for member in members
                if member in facts and facts[member].entered_last(group) < waiter.seq
            )
        # The waiter itself has entered it, and is none of them.
        found[rank] = behind[key]
    return found


def by_targets(waits: Waits) -> list[tuple[tuple[int, ...], list[int]]]:
    """The ranks that are waited for, with all that wait for just these."""
    found: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for rank, targets in waits.items():
        found.setdefault(id(targets), (targets, []))[1].append(rank)
    return list(found.values())


def first_circle(waits: Waits) -> tuple[int, ...]:
    """Ranks that wait for each other, each for the next; empty when there are none."""
    # Between waiters and those that they wait for stands a node for both, with a negative number.
    graph: dict[int, tuple[int, ...]] = {}
    for number, (targets, waiters) in enumerate(by_targets(waits), start=1):
        graph[-number] = targets
        graph |= dict.fromkeys(waiters, (-number,))
    done: dict[int, None] = {}
    for start in waits:
        circle = tuple(rank for rank in _walk(start, graph, done) if rank >= 0)
        if circle:
            return circle
    return ()


def _peers_missing(waiter: RankFacts, facts: Mapping[int, RankFacts]) -> tuple[int, ...]:
    peers = _peers(waiter)
    return tuple(peer for peer in peers if peer in facts and not _meets(waiter, facts[peer]))


def _peers(waiter: RankFacts) -> tuple[int, ...]:
    """The other end of a send or receive: as recorded, or else both neighbours."""
    if waiter.peer is not None:
        return (waiter.peer,)
    pipeline = waiter.members.get(waiter.group, ())
    if waiter.rank not in pipeline:
        return ()
    at = pipeline.index(waiter.rank)
    return tuple(dict.fromkeys((*pipeline[max(0, at - 1) : at], *pipeline[at + 1 : at + 2])))


def _meets(waiter: RankFacts, other: RankFacts) -> bool:
    """Whether `other` is inside the opposite half of the waiter's exchange."""
    opposite = Op.RECV if waiter.op is Op.SEND else Op.SEND
    return other.inside and other.op is opposite and waiter.rank in _peers(other)


def _walk(
    start: int,
    graph: Mapping[int, tuple[int, ...]],
    done: dict[int, None],
) -> tuple[int, ...]:
    """The first cycle on a depth-first walk from `start`; empty when there is none.

    With its own stack: a job has more ranks than Python has frames.
    """
    path: dict[int, None] = {}
    stack = [(start, iter(graph.get(start, ())))]
    path[start] = None
    while stack:
        node, targets = stack[-1]
        for target in targets:
            if target in path:
                nodes = list(path)
                return tuple(nodes[nodes.index(target) :])
            if target not in done:
                path[target] = None
                stack.append((target, iter(graph.get(target, ()))))
                break
        else:
            stack.pop()
            del path[node]
            done[node] = None
    return ()
