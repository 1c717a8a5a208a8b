"""Which node keeps a copy of each rank's state, so that a lost node's memory is not lost.

A copy lies on another node, always. Where there is a choice it lies outside the rank's own
tensor, pipeline and data groups, as whatever takes down a group (its switch, its
collective) should not take both. What data parallelism already holds on another node is
not copied at all: a twin there is as good as a copy.

All ranks of a node have their copies on one other node, and every node keeps those of one
other: node i gives to node i + shift. So nobody keeps more than anybody else, a node needs
one connection, and losing two nodes loses a copy only if they are such a pair. Every agent
computes the same from the layout; nothing is negotiated.

What does not belong here: sending (`checkpoint/replicas/sender.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outlast.layout import Layout

# Twins that a rank without memory asks: one, and another one where that is lost, too.
_MAX_TWINS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where else the state of each rank is; everything is indexed by rank."""

    layout: Layout
    holders: tuple[str | None, ...]
    """The node that keeps a copy; None where twins make it needless, or there is one node."""
    twinned: frozenset[int]
    """Ranks whose state a rank on another node holds anyway."""
    rank_nodes: tuple[str, ...]

    @property
    def is_copying(self) -> bool:
        """Whether any rank's state goes to another node."""
        return any(holder is not None for holder in self.holders)

    def held_on(self, node: str) -> tuple[int, ...]:
        """The ranks whose copies `node` keeps."""
        return tuple(rank for rank, holder in enumerate(self.holders) if holder == node)

    def near_twins(self, rank: int) -> tuple[int, ...]:
        """A few twins on nodes of their own, so that ranks that need one ask different ones."""
        if rank not in self.twinned:
            return ()
        at, layout = self.layout.coordinate(rank), self.layout
        first = rank - at.dp * layout.tp
        found: dict[str, int] = {}
        # Those that follow the rank, and then from the first one on.
        for step in range(1, layout.dp):
            twin = first + (at.dp + step) % layout.dp * layout.tp
            node = self.rank_nodes[twin]
            if node != self.rank_nodes[rank] and node not in found:
                found[node] = twin
                if len(found) == _MAX_TWINS:
                    break
        return tuple(found.values())

    def partners(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The nodes that have the state of any of these ranks, as far as they may be asked."""
        found: dict[str, None] = {}
        for rank in ranks:
            holder = self.holders[rank]
            if holder is not None:
                found[holder] = None
                continue
            found |= dict.fromkeys(self.rank_nodes[twin] for twin in self.near_twins(rank))
        return tuple(found)


def place_replicas(layout: Layout, rank_nodes: Sequence[str], *, dp_is_sharded: bool) -> Placement:
    """Where the state of every rank is kept besides on its own node.

    `rank_nodes` names each rank's node, `dp_is_sharded` says that no two data-parallel
    ranks hold the same.

    Raises:
        ValueError: there is not one node for each rank of the layout.
    """
    if len(rank_nodes) != layout.world_size:
        raise ValueError(f"{len(rank_nodes)} ranks have nodes, of {layout.world_size} ranks")
    # Ranks with a twin have one on another node when their replicas are on several.
    twinned = set[int]()
    if not dp_is_sharded:
        for group in layout.dp_groups():
            if any(rank_nodes[rank] != rank_nodes[group[0]] for rank in group):
                twinned.update(group)
    nodes = tuple(dict.fromkeys(rank_nodes))
    copied = [rank for rank in range(layout.world_size) if rank not in twinned]
    holders: list[str | None] = [None] * layout.world_size
    if len(nodes) > 1 and copied:
        index = {node: place for place, node in enumerate(nodes)}
        places = [index[node] for node in rank_nodes]
        shift = _choose_shift(layout, places, len(nodes), copied)
        for rank in copied:
            holders[rank] = nodes[(places[rank] + shift) % len(nodes)]
    return Placement(
        layout=layout,
        holders=tuple(holders),
        twinned=frozenset(twinned),
        rank_nodes=tuple(rank_nodes),
    )


def _choose_shift(
    layout: Layout, places: Sequence[int], num_nodes: int, copied: Iterable[int]
) -> int:
    """The smallest shift by which the fewest ranks share a group with their holder.

    Nodes are bits: a group is the set of its nodes' bits, and turned by the place of a rank's
    node it is the set of shifts that lead into the group. Sets of nodes are made once, and ranks
    are counted by them, so that the work grows with the ranks and not with pairs of nodes.
    """
    tp = layout.tp
    if all(places[shard::tp] == places[::tp] for shard in range(1, tp)):
        # Each tensor group is on one node: its ranks have the same neighbours, one counts for all.
        copied = [rank // tp for rank in copied if rank % tp == 0]
        layout, places = replace(layout, tp=1), places[::tp]
    everyone = (1 << num_nodes) - 1
    planes: list[int] = []
    for (at, neighbours), count in _alike(layout, places, num_nodes, copied).items():
        shifts = ((neighbours >> at) | (neighbours << (num_nodes - at))) & everyone
        # A rank that has neighbours everywhere speaks for no shift.
        if shifts != everyone:
            _count(planes, shifts, count)
    return _least_counted(planes, everyone & ~1)


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
    """The smallest of the members that were counted least often."""
    for plane in reversed(planes):
        members = members & ~plane or members
    return (members & -members).bit_length() - 1
