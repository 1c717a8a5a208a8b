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
from dataclasses import dataclass

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
            nodes = [self.rank_nodes[twin] for twin in self.near_twins(rank)]
            found |= dict.fromkeys(nodes if holder is None else [holder])
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
            if len({rank_nodes[rank] for rank in group}) > 1:
                twinned.update(group)
    nodes = tuple(dict.fromkeys(rank_nodes))
    copied = [rank for rank in range(layout.world_size) if rank not in twinned]
    holders: list[str | None] = [None] * layout.world_size
    if len(nodes) > 1 and copied:
        shift = _choose_shift(layout, rank_nodes, nodes, copied)
        place = {node: index for index, node in enumerate(nodes)}
        for rank in copied:
            holders[rank] = nodes[(place[rank_nodes[rank]] + shift) % len(nodes)]
    return Placement(
        layout=layout,
        holders=tuple(holders),
        twinned=frozenset(twinned),
        rank_nodes=tuple(rank_nodes),
    )


def _choose_shift(
    layout: Layout, rank_nodes: Sequence[str], nodes: Sequence[str], copied: Sequence[int]
) -> int:
    """The smallest shift by which the fewest ranks share a group with their holder.

    Nodes are bits: a group is the set of its nodes' bits, and turned by the place of a rank's
    node it is the set of shifts that lead into the group. Ten thousand nodes take a second.
    """
    place = {node: index for index, node in enumerate(nodes)}
    neighbours = [0] * layout.world_size
    for groups in (layout.tp_groups(), layout.pp_groups(), layout.dp_groups()):
        for group in groups:
            bits = _bits({place[rank_nodes[rank]] for rank in group}, len(nodes))
            for rank in group:
                neighbours[rank] |= bits
    # Ranks of a node most often have the same neighbours.
    alike = Counter((place[rank_nodes[rank]], neighbours[rank]) for rank in copied)
    everyone = (1 << len(nodes)) - 1
    into: Counter[int] = Counter()
    used = 1
    for (at, bits), count in alike.items():
        shifts = ((bits >> at) | (bits << (len(nodes) - at))) & everyone
        used |= shifts
        # A rank that has neighbours everywhere speaks for no shift.
        if shifts != everyone:
            into[shifts] += count
    free = everyone & ~used
    if free:
        return (free & -free).bit_length() - 1
    return min(
        range(1, len(nodes)),
        key=lambda shift: sum(count for shifts, count in into.items() if shifts >> shift & 1),
    )


def _bits(places: Iterable[int], width: int) -> int:
    found = bytearray(-(-width // 8))
    for place in places:
        found[place // 8] |= 1 << place % 8
    return int.from_bytes(found, "little")
