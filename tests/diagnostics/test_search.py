"""The pair search names exactly what is broken, and nobody when nothing is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.search import (
    ROUNDS,
    Outcome,
    Pair,
    PairTest,
    SearchVerdict,
    conclude,
    pair_of,
    plan_round,
    waves,
)

World = Callable[[Pair, int], Outcome]


def names(count: int) -> list[str]:
    return [f"n{number:03}" for number in range(count)]


def broken(nodes: frozenset[str] = frozenset(), links: frozenset[Pair] = frozenset()) -> World:
    """Faults that always show."""

    def outcome(pair: Pair, _round: int) -> Outcome:
        return Outcome.BAD if nodes & set(pair) or pair in links else Outcome.GOOD

    return outcome


def search(
    nodes: list[str], world: World, *, spares: tuple[str, ...] = (), matchings: int = 7
) -> SearchVerdict:
    """Run the whole search in a world."""
    tests: list[PairTest] = []
    for number in range(ROUNDS):
        pairs = plan_round(nodes, tests, spares=spares, matchings=matchings)
        assert len(set(pairs)) == len(pairs)
        for wave in waves(pairs):
            busy = [node for pair in wave for node in pair]
            assert len(set(busy)) == len(busy), "a node is in two tests at once"
        tests += [PairTest(pair=pair, round=number, outcome=world(pair, number)) for pair in pairs]
    assert plan_round(nodes, tests, spares=spares, matchings=matchings) == ()
    return conclude(nodes, tests, spares=spares)


def accused(verdict: SearchVerdict) -> tuple[set[str], set[Pair]]:
    return set(verdict.bad_nodes), set(verdict.bad_links)


@given(count=st.integers(3, 24), data=st.data(), matchings=st.integers(1, 7))
def test_a_single_bad_node_is_named_and_nothing_else(
    count: int, data: st.DataObject, matchings: int
) -> None:
    nodes = data.draw(st.permutations(names(count)))
    bad = data.draw(st.sampled_from(nodes))
    verdict = search(nodes, broken(nodes=frozenset({bad})), matchings=matchings)
    if count == 3 and matchings < 3 and not verdict.bad_nodes:
        # Both tests of round 0 may have met the bad node, and then nothing is proven good.
        assert any(bad in item.nodes for item in verdict.unresolved)
        assert not verdict.bad_links
        return
    assert accused(verdict) == ({bad}, set())
    assert not verdict.unresolved


@given(count=st.integers(3, 8), data=st.data())
def test_a_single_bad_link_of_a_small_fleet_is_named_and_nothing_else(
    count: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.permutations(names(count)))
    link = pair_of(*data.draw(st.permutations(nodes))[:2])
    verdict = search(nodes, broken(links=frozenset({link})))
    assert accused(verdict) == (set(), {link})
    assert verdict.num_links_tested == verdict.num_links


@given(count=st.integers(9, 40), data=st.data())
def test_a_bad_link_of_a_large_fleet_never_accuses_a_node(count: int, data: st.DataObject) -> None:
    nodes = data.draw(st.permutations(names(count)))
    link = pair_of(*data.draw(st.permutations(nodes))[:2])
    verdict = search(nodes, broken(links=frozenset({link})))
    assert verdict.bad_nodes == ()
    # It is met or it is not, and the verdict says how much was looked at.
    assert set(verdict.bad_links) <= {link}
    assert verdict.num_links_tested < verdict.num_links


@given(count=st.integers(8, 32), data=st.data())
def test_several_bad_nodes_are_all_named(count: int, data: st.DataObject) -> None:
    nodes = data.draw(st.permutations(names(count)))
    bad = data.draw(st.sets(st.sampled_from(nodes), min_size=2, max_size=count // 4))
    verdict = search(nodes, broken(nodes=frozenset(bad)))
    assert accused(verdict) == (bad, set())


@given(count=st.integers(6, 8), data=st.data())
def test_a_bad_node_and_a_bad_link_elsewhere_are_told_apart(
    count: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.permutations(names(count)))
    bad, one, other, *_ = data.draw(st.permutations(nodes))
    link = pair_of(one, other)
    verdict = search(nodes, broken(nodes=frozenset({bad}), links=frozenset({link})))
    assert accused(verdict) == ({bad}, {link})


@given(count=st.integers(2, 24), data=st.data())
def test_failures_that_do_not_come_back_name_nobody(count: int, data: st.DataObject) -> None:
    """Whatever fails in one round only, be it everything at once."""
    nodes = names(count)
    noisy = data.draw(st.integers(0, ROUNDS - 1))
    unlucky = data.draw(
        st.sets(st.sampled_from([pair_of(a, b) for a in nodes for b in nodes if a < b]))
    )

    def world(pair: Pair, number: int) -> Outcome:
        return Outcome.BAD if number == noisy and pair in unlucky else Outcome.GOOD

    assert accused(search(nodes, world)) == (set(), set())


@given(count=st.integers(2, 12), data=st.data())
def test_a_test_that_could_not_run_accuses_nobody(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    mute = data.draw(st.sets(st.sampled_from(nodes)))

    def world(pair: Pair, _round: int) -> Outcome:
        return Outcome.UNKNOWN if mute & set(pair) else Outcome.GOOD

    verdict = search(nodes, world)
    assert accused(verdict) == (set(), set())
    assert verdict.unresolved == ()


def test_two_nodes_alone_cannot_be_told_apart() -> None:
    verdict = search(names(2), broken(nodes=frozenset({"n000"})))
    assert accused(verdict) == (set(), set())
    (item,) = verdict.unresolved
    assert item.nodes == ("n000", "n001")
    assert "add a healthy spare" in item.reason


@pytest.mark.parametrize(
    ("world", "found"),
    [
        (broken(nodes=frozenset({"n001"})), ({"n001"}, set())),
        (broken(links=frozenset({("n000", "n001")})), (set(), {("n000", "n001")})),
        (broken(), (set(), set())),
    ],
)
def test_a_spare_settles_it_for_two_nodes(world: World, found: tuple[set[str], set[Pair]]) -> None:
    assert accused(search(names(2), world, spares=("spare",))) == found


def test_a_bad_spare_accuses_nobody() -> None:
    world = broken(nodes=frozenset({"n001", "spare"}))
    verdict = search(names(2), world, spares=("spare",))
    assert accused(verdict) == (set(), set())
    assert verdict.unresolved


def test_a_spare_is_not_used_while_nothing_is_wrong() -> None:
    verdict = search(names(4), broken(), spares=("spare",))
    assert accused(verdict) == (set(), set())
    assert verdict.num_links_tested == 6


def test_everything_broken_is_said_to_be_undecidable() -> None:
    nodes = names(5)
    verdict = search(nodes, broken(nodes=frozenset(nodes)))
    assert accused(verdict) == (set(), set())
    assert verdict.unresolved[0].nodes == tuple(nodes)


def test_a_single_node_has_no_pairs() -> None:
    assert plan_round(["n000"], []) == ()


@given(count=st.integers(2, 40), matchings=st.integers(1, 9))
def test_round_zero_meets_everybody(count: int, matchings: int) -> None:
    nodes = names(count)
    pairs = plan_round(nodes, [], matchings=matchings)
    assert {node for pair in pairs for node in pair} == set(nodes)
    most = min(matchings, count - 1 if count % 2 == 0 else count)
    assert len(waves(pairs)) <= most + 2
