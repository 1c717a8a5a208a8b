"""Who computed wrong, as far as what ranks hold tells.

Of a non-finite gradient: replicas hold the same sums, so what one of them alone holds
came after the sum.

Of other bits: every replica computes its own part of a step and, once more, that of another one,
which is `shift` further on. So each replica has a part in two comparisons, and one that computes
wrong shows in both, or in one if it is wrong now and then only.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.layout import Coordinate, Layout


def best_shift(nodes: Sequence[frozenset[str]]) -> int:
    """The shift by which as many replicas as possible are computed on other nodes, too.

    `nodes` has each replica's. A node that is wrong makes all its replicas wrong, perhaps alike.
    """
    best, most = 1, -1
    for shift in range(1, len(nodes)):
        others = (*nodes[shift:], *nodes[:shift])
        apart = sum(own.isdisjoint(other) for own, other in zip(nodes, others, strict=True))
        if apart > most:
            best, most = shift, apart
        # With thousands of replicas not all need be tried.
        if apart == len(nodes):
            break
    return best


def comparable(kinds: Sequence[int], layout: Layout, *, shift: int) -> list[bool]:
    """By replica, whether it computes on the same kinds of processors as the one `shift` on.

    `kinds` has each rank's. Processors of two kinds may differ in bits and both be right, and what
    one rank computes goes into all of its replica.
    """
    of_replica: list[list[int]] = [[] for _ in range(layout.num_replicas)]
    for rank, kind in enumerate(kinds):
        of_replica[layout.replica(rank)].append(kind)
    others = (*of_replica[shift:], *of_replica[:shift])
    return [own == other for own, other in zip(of_replica, others, strict=True)]


def accused(differs: Sequence[bool], *, shift: int, suspects: frozenset[int]) -> frozenset[int]:
    """The replicas one of which computed wrong; empty where all agree.

    `differs[r]`: the part of replica `r + shift` has other bits on `r` than on that one itself.
    As few are accused as explain every difference; those among `suspects` first, of whom there
    is an earlier sign.
    """
    pairs = [
        frozenset((index, (index + shift) % len(differs)))
        for index, is_different in enumerate(differs)
        if is_different
    ]
    if not pairs:
        return frozenset()
    in_all = frozenset.intersection(*pairs)
    found = in_all or frozenset.union(*pairs)
    return found & suspects or found


def makers(
    bad: Sequence[bool], layout: Layout, *, num_chunks: int = 1, copies: Sequence[bool] = ()
) -> frozenset[int]:
    """The ranks that made a gradient without a norm; empty where that cannot be known.

    `bad` has, by rank, whether its own copy of the sums over all replicas has none; `copies` the
    same of a tied table that the first and the last stage have each, and have added up since: of
    these alone only one end's can be known.
    """
    if not any(bad) and any(copies):
        if len({layout.coordinate(rank).pp for rank, is_bad in enumerate(copies) if is_bad}) > 1:
            return frozenset()
        bad = copies
    if layout.ep > 1:
        # Replicas hold sums over each other's tokens, too.
        return frozenset()
    if layout.dp > 1:
        # What all replicas of a shard hold was there before the sum, and anyone may have made it.
        return frozenset(
            rank
            for group in layout.dp_groups()
            if not all(bad[rank] for rank in group)
            for rank in group
            if bad[rank]
        )
    stages = {layout.coordinate(rank).pp for rank, is_bad in enumerate(bad) if is_bad}
    if num_chunks > 1 and len(stages) == layout.pp:
        # On their way to the first chunk, gradients of a later one come through all stages.
        return frozenset()
    # Gradients flow from the last stage to the first: those after the maker are well.
    last = max(stages, default=0)
    stage = (layout.rank(Coordinate(pp=last, dp=0, tp=tp)) for tp in range(layout.tp))
    return frozenset(rank for rank in stage if bad[rank])
