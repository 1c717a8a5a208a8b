"""By how many places the copies of a node's ranks are away from it.

Losing a rack, a switch or a group should not take both a rank's state and its copy.

What does not belong here: which ranks are copied at all (`checkpoint.core.placement`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from outlast.layout import Layout

# Where a node stands, such as ("block-1", "rack-7"), outermost first.
Domain = tuple[str, ...]


def choose_shift(
    layout: Layout,
    places: Sequence[int],
    num_nodes: int,
    copied: Iterable[int],
    domains: Sequence[Domain] = (),
) -> int:
    """Of the shifts by which the fewest nodes share a failure domain with their holder, the
    smallest by which the fewest ranks share a group with it.

    `places` has the index of each rank's node. `domains` says by index where a node stands, `()`
    where that is not known; unless given, only groups count.

    Nodes are bits: a group is the set of its nodes' bits, and turned by the place of a rank's
    node it is the set of shifts that lead into the group. Sets of nodes are made once, and ranks
    are counted by them, so that the work grows with the ranks and not with pairs of nodes.
    """
    everyone = (1 << num_nodes) - 1
    apart = _least_counted(_shared_domains(domains, num_nodes), everyone & ~1)
    tp = layout.tp
    if all(places[shard::tp] == places[::tp] for shard in range(1, tp)):
        # Each tensor group is on one node: its ranks have the same neighbours, one counts for all.
        copied = [rank // tp for rank in copied if rank % tp == 0]
        layout, places = replace(layout, tp=1), places[::tp]
    planes: list[int] = []
    for (at, neighbours), count in _alike(layout, places, num_nodes, copied).items():
        # A rank that has neighbours everywhere speaks for no shift.
        if neighbours != everyone:
            _count(planes, _turned(neighbours, at, num_nodes), count)
    best = _least_counted(planes, apart)
    return (best & -best).bit_length() - 1


def _shared_domains(domains: Sequence[Domain], num_nodes: int) -> list[int]:
    """By how many nodes a shift leads into their own innermost domain, as `_count` has it."""
    planes: list[int] = []
    members: dict[Domain, list[int]] = {}
    for index, domain in enumerate(domains):
        if domain:
            members.setdefault(domain, []).append(index)
    for indexes in members.values():
        # What all nodes share speaks for no shift.
        if len(indexes) < num_nodes:
            bits = _bits(indexes, num_nodes)
            for index in indexes:
                _count(planes, _turned(bits, index, num_nodes), 1)
    return planes


def _turned(members: int, at: int, num_nodes: int) -> int:
    """The shifts that lead from the node at an index to one of these nodes."""
    return ((members >> at) | (members << (num_nodes - at))) & ((1 << num_nodes) - 1)


def _alike(
    layout: Layout, places: Sequence[int], num_nodes: int, ranks: Iterable[int]
) -> dict[tuple[int, int], int]:
    """How many of the ranks have the same place and the same nodes in their groups, as bits."""
    # By the nodes of a group, where in `sets` their bits are.
    known: dict[tuple[int, ...], int] = {}
    sets: list[int] = []
    groups_of_ranks = []
    for groups in (layout.tp_groups(), layout.pp_groups(), layout.dp_groups()):
        group_of_rank = [0] * layout.world_size
        for group in groups:
            members = tuple(dict.fromkeys([places[rank] for rank in group]))
            number = known.setdefault(members, len(sets))
            if number == len(sets):
                sets.append(_bits(members, num_nodes))
            for rank in group:
                group_of_rank[rank] = number
        groups_of_ranks.append(group_of_rank)
    tp, pp, dp = groups_of_ranks
    counts: Counter[tuple[int, int]] = Counter()
    # Counted before their bits are put together: ranks of a node most often are alike.
    alike = Counter([(places[rank], tp[rank], pp[rank], dp[rank]) for rank in ranks])
    for (at, *of), count in alike.items():
        counts[at, sets[of[0]] | sets[of[1]] | sets[of[2]]] += count
    return counts


def _bits(places: Iterable[int], width: int) -> int:
    found = bytearray(-(-width // 8))
    for place in places:
        found[place // 8] |= 1 << place % 8
    return int.from_bytes(found, "little")


def _count(planes: list[int], members: int, times: int) -> None:
    """Add `times` to the count of each member of a set of bits.

    Bit i of `planes[k]` is binary digit k of the count of i, so that one addition of long
    integers counts for thousands of members.
    """
    for digit in range(times.bit_length()):
        carry = members if times >> digit & 1 else 0
        plane = digit
        while carry:
            planes += [0] * (plane + 1 - len(planes))
            planes[plane], carry = planes[plane] ^ carry, planes[plane] & carry
            plane += 1


def _least_counted(planes: Sequence[int], members: int) -> int:
    """The members that were counted least often."""
    for plane in reversed(planes):
        members = members & ~plane or members
    return members
