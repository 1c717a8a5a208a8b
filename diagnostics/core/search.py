"""The pair search: which node, or which link between two nodes, is at fault.

Two nodes that exchange data well are both sound, and so is what lies between
them. Two that do not are three suspects: either node, or the link. So:

- round 0 pairs the nodes up, several times over (`matchings`), so that in a
  small fleet every link is met;
- round 1 pairs each suspect with a node that is proven good, and tries again
  each failed pair whose two ends are both proven good;
- round 2 does the same with another partner.

A *node* is named when it never worked with anybody and failed with at least two
proven-good partners, in two rounds or more. A *link* is named when it failed in
two rounds or more and never worked, while both its ends work with others. A
failure that did not come back names nobody. Where nothing is proven good (two
nodes and no spare), the search says that it cannot tell.

What does not belong here: running tests, and what makes one good or bad.

Source: the 2-round pairing of DLRover's node check, which clears a node that
passes *any* round and so never reports a link; round 2 and the spares are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

ROUNDS = 3
# With so many matchings every link of a fleet of up to eight nodes is met; in a larger one each
# link is met with a chance of 7 in N - 1.
DEFAULT_MATCHINGS = 7
# One failure may be chance, and one partner may be the bad one.
_MIN_BAD_ROUNDS = 2
_MIN_PARTNERS = 2

Pair = tuple[str, str]


class Outcome(StrEnum):
    """How a test of a pair ended."""

    GOOD = "good"
    BAD = "bad"
    # It could not run, which says nothing about either node.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """One test of two nodes against each other."""

    pair: Pair
    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """Nodes that failed and could be neither cleared nor accused."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchVerdict:
    """What the search has found."""

    bad_nodes: tuple[str, ...]
    bad_links: tuple[Pair, ...]
    # They failed and then worked, or could not be tried again: nobody is named for it.
    unsteady_links: tuple[Pair, ...]
    unresolved: tuple[Unresolved, ...]
    # How many links were met, and how many there are.
    num_links_tested: int
    num_links: int


def pair_of(one: str, other: str) -> Pair:
    """Two nodes in the order in which pairs are written."""
    assert one != other, one
    return (one, other) if one < other else (other, one)


def plan_round(
    nodes: Sequence[str],
    tests: Sequence[PairTest],
    *,
    spares: Sequence[str] = (),
    matchings: int = DEFAULT_MATCHINGS,
) -> tuple[Pair, ...]:
    """The pairs of the next round; none when the search is over.

    `nodes` should come in random order: it decides which links are met. A
    healthy spare serves as a partner when no node is proven good.
    """
    if not tests:
        return _cover(nodes, matchings)
    if max(test.round for test in tests) + 1 >= ROUNDS:
        return ()
    history = _History(tests)
    suspects = [node for node in nodes if history.is_suspect(node)]
    references = [node for node in (*nodes, *spares) if history.is_proven(node)]
    references = references or [node for node in spares if not history.is_suspect(node)]
    pairs = list(history.failed_links())
    used: Counter[str] = Counter()
    for suspect in suspects:
        # A new partner first; among equals the one that has the least to do.
        choices = [node for node in references if node != suspect]
        if not choices:
            continue
        best = min(choices, key=lambda node: (history.met(suspect, node), used[node]))
        used[best] += 1
        pairs.append(pair_of(suspect, best))
    return tuple(dict.fromkeys(pairs))


def conclude(
    nodes: Sequence[str], tests: Sequence[PairTest], *, spares: Sequence[str] = ()
) -> SearchVerdict:
    """The verdict on everything that was tested."""
    history = _History(tests)
    everyone = (*nodes, *spares)
    bad_nodes = tuple(node for node in everyone if history.is_bad_node(node))
    failed = history.failed_links()
    bad_links = tuple(pair for pair in failed if history.bad_rounds(pair) >= _MIN_BAD_ROUNDS)
    unsteady = [pair for pair in failed if pair not in bad_links]
    unsteady += [pair for pair in history.pairs if history.is_unsteady(pair)]
    left = [node for node in nodes if history.is_suspect(node) and node not in bad_nodes]
    count = len(nodes)
    return SearchVerdict(
        bad_nodes=bad_nodes,
        bad_links=bad_links,
        unsteady_links=tuple(unsteady),
        unresolved=_explain(left, history, has_spares=bool(spares)),
        num_links_tested=sum(1 for pair in history.pairs if set(pair) <= set(nodes)),
        num_links=count * (count - 1) // 2,
    )


def waves(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """The pairs in groups that can run at once: no node is twice in one."""
    found: list[list[Pair]] = []
    # The nodes of each: a large fleet has thousands of pairs.
    busy: list[set[str]] = []
    for pair in pairs:
        for wave, nodes in zip(found, busy, strict=True):
            if nodes.isdisjoint(pair):
                wave.append(pair)
                nodes.update(pair)
                break
        else:
            found.append([pair])
            busy.append(set(pair))
    return tuple(tuple(wave) for wave in found)


class _History:
    """What the tests so far say of each node and pair."""

    def __init__(self, tests: Sequence[PairTest]) -> None:
        # A test that could not run counts as none.
        decided = [test for test in tests if test.outcome is not Outcome.UNKNOWN]
        self.pairs = tuple(dict.fromkeys(test.pair for test in decided))
        self._good = Counter(test.pair for test in decided if test.outcome is Outcome.GOOD)
        self._bad = [test for test in decided if test.outcome is Outcome.BAD]
        self._proven = dict.fromkeys(node for pair in self._good for node in pair)

    def is_proven(self, node: str) -> bool:
        """Whether it has worked with somebody."""
        return node in self._proven

    def is_suspect(self, node: str) -> bool:
        """Whether it has failed, and worked with nobody."""
        return not self.is_proven(node) and any(node in test.pair for test in self._bad)

    def met(self, one: str, other: str) -> int:
        """How often the two were tested against each other."""
        pair = pair_of(one, other)
        return self._good[pair] + sum(1 for test in self._bad if test.pair == pair)

    def bad_rounds(self, pair: Pair) -> int:
        return len({test.round for test in self._bad if test.pair == pair})

    def failed_links(self) -> tuple[Pair, ...]:
        """Pairs that never worked, though both ends work with others."""
        failed = dict.fromkeys(test.pair for test in self._bad)
        return tuple(
            pair
            for pair in failed
            if pair not in self._good and all(self.is_proven(node) for node in pair)
        )

    def is_unsteady(self, pair: Pair) -> bool:
        """Whether it has both failed and worked."""
        return pair in self._good and self.bad_rounds(pair) > 0

    def good_partners_failed(self, node: str) -> tuple[str, ...]:
        """Proven-good nodes with which this one failed."""
        partners = dict.fromkeys(
            other for test in self._bad if node in test.pair for other in test.pair if other != node
        )
        return tuple(other for other in partners if self.is_proven(other))

    def is_bad_node(self, node: str) -> bool:
        rounds = {test.round for test in self._bad if node in test.pair}
        return (
            self.is_suspect(node)
            and len(rounds) >= _MIN_BAD_ROUNDS
            and len(self.good_partners_failed(node)) >= _MIN_PARTNERS
        )


def _cover(nodes: Sequence[str], matchings: int) -> tuple[Pair, ...]:
    """So many rounds of a tournament (circle method); everybody plays at least once."""
    if len(nodes) < 2:
        return ()
    circle: list[str | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    pairs: list[Pair] = []
    for _ in range(min(matchings, len(circle) - 1)):
        for place in range(len(circle) // 2):
            one, other = circle[place], circle[-1 - place]
            if one is not None and other is not None:
                pairs.append(pair_of(one, other))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    for node in nodes:
        if not any(node in pair for pair in pairs):
            # The odd one out plays with somebody who has played already.
            pairs.append(pair_of(node, nodes[0] if nodes[0] != node else nodes[1]))
    return tuple(pairs)


def _explain(suspects: list[str], history: _History, *, has_spares: bool) -> tuple[Unresolved, ...]:
    """Why suspects are neither cleared nor accused."""
    alone = [node for node in suspects if not history.good_partners_failed(node)]
    found = []
    if alone:
        hint = "" if has_spares else "; add a healthy spare node to the run"
        found.append(
            Unresolved(
                nodes=tuple(alone),
                reason=f"no exchange of {', '.join(alone)} worked, and none was with a node "
                f"that is proven good, so node and link cannot be told apart{hint}",
            )
        )
    for node in suspects:
        partners = history.good_partners_failed(node)
        if partners:
            found.append(
                Unresolved(
                    nodes=(node,),
                    reason=f"{node} failed with {', '.join(partners)} and worked with nobody, but "
                    "not often enough to be sure; run it again with more nodes",
                )
            )
    return tuple(found)
