"""Whose bits are wrong, when replicas that should agree do not.

Every replica computes its own part of a step and, once more, that of another replica, which is
`shift` further on. So each replica has a part in two comparisons, and one that computes wrong
shows in both, or in one if it is wrong now and then only.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_shift(nodes: Sequence[frozenset[str]]) -> int:
    """The shift by which as many replicas as possible are computed on other nodes, too.

    `nodes` has each replica's. A node that is wrong makes all its replicas wrong, perhaps alike.
    """

    def num_apart(shift: int) -> int:
        others = (nodes[(index + shift) % len(nodes)] for index in range(len(nodes)))
        return sum(own.isdisjoint(other) for own, other in zip(nodes, others, strict=True))

    return max(range(1, len(nodes)), key=num_apart)


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
