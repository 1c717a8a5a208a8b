"""Which node keeps a copy of each rank's state, so that a lost node's memory is not lost.

A copy lies on another node, always. Where there is a choice it lies outside the rank's own
tensor, pipeline and data groups, as whatever takes down a group (its switch, its
collective) should not take both. What data parallelism already holds on another node is
not copied at all: a twin there is as good as a copy.

All ranks of a node have their copies on one other node, and every node keeps those of one
other: node i gives to node i + shift. So nobody keeps more than anybody else, a node needs
one connection, and losing two nodes loses a copy only if they are such a pair. Every agent
computes the same from the layout, or from the shift that its order to start names.

What does not belong here: sending (`checkpoint/replicas/sender.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outlast.layout import Layout
from outlast.replica_shift import choose_shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where else the state of each rank is; everything is indexed by rank."""

    layout: Layout
    holders: tuple[str | None, ...]
    """The node that keeps a copy; None where twins make it needless, or there is one node."""
    twinned: frozenset[int]
    """Ranks whose state a rank on another node holds anyway."""
    rank_nodes: tuple[str, ...]
    shift: int
    """By how many places a holder is behind its rank's node; 0 where nothing is copied."""

    @property
    def is_copying(self) -> bool:
        """Whether any rank's state goes to another node."""
        return any(holder is not None for holder in self.holders)

    def held_on(self, node: str) -> tuple[int, ...]:
        """The ranks whose copies `node` keeps."""
        return tuple(rank for rank, holder in enumerate(self.holders) if holder == node)

    def twins_to_ask(self, rank: int) -> tuple[int, ...]:
        """Two on nodes of their own, as far as there are any: the next one, and one half way round,
        where what took the rank's node and its neighbours should not have reached.

        Ranks that need one ask different ones.
        """
        if rank not in self.twinned:
            return ()
        at, layout = self.layout.coordinate(rank), self.layout
        first, half = rank - at.dp * layout.tp, layout.dp // 2
        found: dict[str, int] = {}
        for steps in (range(1, layout.dp), (*range(half, layout.dp), *range(1, half))):
            for step in steps:
                twin = first + (at.dp + step) % layout.dp * layout.tp
                node = self.rank_nodes[twin]
                if node != self.rank_nodes[rank] and node not in found:
                    found[node] = twin
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
            found |= dict.fromkeys(self.rank_nodes[twin] for twin in self.twins_to_ask(rank))
        return tuple(found)


def place_replicas(
    layout: Layout, rank_nodes: Sequence[str], *, dp_is_sharded: bool, shift: int = 0
) -> Placement:
    """Where the state of every rank is kept besides on its own node.

    `rank_nodes` names each rank's node, `dp_is_sharded` says that no two data-parallel
    ranks hold the same. `shift` is taken as it is; 0: the one that leads out of most groups.

    Raises:
        ValueError: there is not one node for each rank of the layout, or the shift leads nowhere.
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
    if shift and not 0 < shift < len(nodes):
        raise ValueError(f"copies cannot be {shift} places away on {len(nodes)} nodes")
    copied = [rank for rank in range(layout.world_size) if rank not in twinned]
    holders: list[str | None] = [None] * layout.world_size
    if len(nodes) > 1 and copied:
        index = {node: place for place, node in enumerate(nodes)}
        places = [index[node] for node in rank_nodes]
        shift = shift or choose_shift(layout, places, len(nodes), copied)
        for rank in copied:
            holders[rank] = nodes[(places[rank] + shift) % len(nodes)]
    else:
        shift = 0
    return Placement(
        layout=layout,
        holders=tuple(holders),
        twinned=frozenset(twinned),
        rank_nodes=tuple(rank_nodes),
        shift=shift,
    )
