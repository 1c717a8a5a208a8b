"""Which node keeps a copy of each rank's state, so that a lost node's memory is not lost.

A copy lies on another node, always. Where there is a choice it lies outside the rank's own
tensor, pipeline and data groups, as whatever takes down a group (its switch, its
collective) should not take both. What data parallelism already holds on another node is
not copied at all: a twin there is as good as a copy.

All ranks of a node have their copies on one other node, and every node keeps those of one
other: node i gives to node i + shift. So nobody keeps more than anybody else, a node needs
one connection, and losing two nodes loses a copy only if they are such a pair. Every agent
computes the same from the layout; nothing is negotiated.

What does not belong here: sending (`checkpoint/replicas.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outlast.layout import Layout

_GROUPS = ("tp", "pp", "dp")
# Twins that a rank without memory asks: one, and another one where that is lost, too.
_MAX_TWINS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where else the state of each rank is; everything is indexed by rank."""

    holders: tuple[str | None, ...]
    """The node that keeps a copy; None where twins make it needless, or there is one node."""
    twins: tuple[tuple[int, ...], ...]
    """Ranks on other nodes that hold the same state anyway, in rank order."""

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
        following = sorted(self.twins[rank], key=lambda twin: (twin - rank) % len(self.holders))
        by_node = {self.rank_nodes[twin]: twin for twin in reversed(following)}
        near = [twin for twin in following if by_node[self.rank_nodes[twin]] == twin]
        return tuple(near[:_MAX_TWINS])

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
    twins = tuple(
        () if dp_is_sharded else _elsewhere(layout.group_of("dp", rank), rank, rank_nodes)
        for rank in range(layout.world_size)
    )
    nodes = tuple(dict.fromkeys(rank_nodes))
    copied = [rank for rank, others in enumerate(twins) if not others]
    if len(nodes) < 2 or not copied:
        nobody = (None,) * layout.world_size
        return Placement(holders=nobody, twins=twins, rank_nodes=tuple(rank_nodes))
    shift = _choose_shift(layout, rank_nodes, nodes, copied)
    place = {node: index for index, node in enumerate(nodes)}
    holders: list[str | None] = [None] * layout.world_size
    for rank in copied:
        holders[rank] = nodes[(place[rank_nodes[rank]] + shift) % len(nodes)]
    return Placement(holders=tuple(holders), twins=twins, rank_nodes=tuple(rank_nodes))


def _elsewhere(group: Sequence[int], rank: int, rank_nodes: Sequence[str]) -> tuple[int, ...]:
    return tuple(other for other in group if rank_nodes[other] != rank_nodes[rank])


def _choose_shift(
    layout: Layout, rank_nodes: Sequence[str], nodes: Sequence[str], copied: Sequence[int]
) -> int:
    """The smallest shift by which the fewest ranks share a group with their holder."""
    # A group has as many ranks as there are nodes at most, most often far fewer.
    neighbours = {
        rank: {rank_nodes[other] for kind in _GROUPS for other in layout.group_of(kind, rank)}
        for rank in copied
    }
    place = {node: index for index, node in enumerate(nodes)}
    best, fewest = 1, len(copied) + 1
    for shift in range(1, len(nodes)):
        shared = sum(
            nodes[(place[rank_nodes[rank]] + shift) % len(nodes)] in neighbours[rank]
            for rank in copied
        )
        if shared < fewest:
            best, fewest = shift, shared
        if fewest == 0:
            break
    return best
