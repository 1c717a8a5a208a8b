from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.placement import Placement, place_replicas
from outlast.layout import Layout
from outlast.replica_shift import choose_shift

few = settings(max_examples=80, deadline=None)

degrees = st.sampled_from([1, 2, 3, 4])
_RACKS = st.sampled_from([(), ("a",), ("b",), ("a", "a"), ("a", "b")])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, list[str], bool]:
    """A layout, the node of each rank, and whether dp is sharded."""
    layout = Layout(tp=draw(degrees), pp=draw(degrees), dp=draw(degrees))
    world = layout.world_size
    per_node = draw(st.sampled_from([size for size in range(1, world + 1) if world % size == 0]))
    names = draw(st.permutations([f"n{number}" for number in range(world // per_node)]))
    return layout, [names[rank // per_node] for rank in range(world)], draw(st.booleans())


def place(job: tuple[Layout, list[str], bool]) -> Placement:
    layout, nodes, dp_is_sharded = job
    return place_replicas(layout, nodes, dp_is_sharded=dp_is_sharded)


@few
@given(jobs())
def test_every_rank_has_its_state_on_another_node_where_there_is_one(
    job: tuple[Layout, list[str], bool],
) -> None:
    _, nodes, _ = job
    placement = place(job)
    for rank, node in enumerate(nodes):
        others = [placement.holders[rank], *(nodes[twin] for twin in placement.twins_to_ask(rank))]
        elsewhere = [other for other in others if other is not None]
        assert node not in elsewhere
        assert bool(elsewhere) == (len(set(nodes)) > 1)


@few
@given(jobs())
def test_what_data_parallelism_has_on_another_node_is_not_copied(
    job: tuple[Layout, list[str], bool],
) -> None:
    layout, nodes, dp_is_sharded = job
    placement = place(job)
    for rank in range(layout.world_size):
        spread = len({nodes[peer] for peer in layout.group_of("dp", rank)}) > 1
        if spread and not dp_is_sharded:
            assert placement.holders[rank] is None
            assert placement.twins_to_ask(rank)
        elif len(set(nodes)) > 1:
            assert placement.holders[rank] is not None


@few
@given(jobs())
def test_no_node_keeps_more_than_it_gives_and_all_ranks_of_a_node_go_to_one(
    job: tuple[Layout, list[str], bool],
) -> None:
    _, nodes, _ = job
    placement = place(job)
    kept = Counter(holder for holder in placement.holders if holder is not None)
    per_node = len(nodes) // len(set(nodes))
    assert all(count <= per_node for count in kept.values())
    for node in set(nodes):
        holders = {placement.holders[rank] for rank, at in enumerate(nodes) if at == node}
        assert len(holders - {None}) <= 1
        assert sorted(placement.held_on(node)) == list(placement.held_on(node))


@few
@given(jobs())
def test_a_holder_is_outside_the_groups_where_any_turn_allows_that(
    job: tuple[Layout, list[str], bool],
) -> None:
    layout, nodes, _ = job
    placement = place(job)
    order = list(dict.fromkeys(nodes))
    copied = [rank for rank, holder in enumerate(placement.holders) if holder is not None]

    def num_shared(holders: dict[int, str]) -> int:
        return sum(
            any(
                nodes[peer] == holders[rank]
                for kind in ("tp", "pp", "dp")
                for peer in layout.group_of(kind, rank)
            )
            for rank in copied
        )

    chosen = num_shared({rank: str(placement.holders[rank]) for rank in copied})
    for shift in range(1, len(order)):
        turned = {rank: order[(order.index(nodes[rank]) + shift) % len(order)] for rank in copied}
        assert chosen <= num_shared(turned)


@few
@given(jobs())
def test_places_do_not_depend_on_names(job: tuple[Layout, list[str], bool]) -> None:
    """The controller plans by place, agents by name: both must find the same."""
    layout, nodes, dp_is_sharded = job
    order = {node: str(index) for index, node in enumerate(dict.fromkeys(nodes))}
    by_place = place_replicas(layout, [order[node] for node in nodes], dp_is_sharded=dp_is_sharded)
    by_name = place(job)
    named = [None if holder is None else order[holder] for holder in by_name.holders]
    assert tuple(named) == by_place.holders
    everyone = range(layout.world_size)
    assert [order[node] for node in by_name.partners(everyone)] == list(by_place.partners(everyone))


def test_pipeline_over_four_nodes_with_sharded_dp_leaves_all_groups() -> None:
    """pp 2 x dp 2 x tp 2, a node for each tensor group: only the diagonal is in no group."""
    nodes = [f"n{rank // 2}" for rank in range(8)]
    placement = place_replicas(Layout(tp=2, pp=2, dp=2), nodes, dp_is_sharded=True)
    # n0 is (stage 0, replica 0), n3 is (stage 1, replica 1). No turn suits every node.
    assert placement.holders[0] != "n0"
    nodes = [f"n{rank // 2}" for rank in range(12)]
    placement = place_replicas(Layout(tp=2, pp=3, dp=2), nodes, dp_is_sharded=False)
    assert placement.holders == (None,) * 12
    assert placement.twins_to_ask(0) == (2,)


def test_copies_of_a_long_pipeline_go_to_the_next_node() -> None:
    nodes = ["a", "a", "b", "b", "c", "c"]
    placement = place_replicas(Layout(tp=2, pp=3), nodes, dp_is_sharded=False)
    assert placement.holders == ("b", "b", "c", "c", "a", "a")
    assert placement.held_on("a") == (4, 5)
    assert placement.partners([0, 1]) == ("b",)


@few
@given(jobs(), st.data())
def test_a_holder_is_in_another_rack_where_any_turn_allows_that(
    job: tuple[Layout, list[str], bool], data: st.DataObject
) -> None:
    """Racks come first, and among the shifts that are best for them, groups."""
    layout, nodes, _ = job
    order = list(dict.fromkeys(nodes))
    racks = data.draw(st.lists(_RACKS, min_size=len(order), max_size=len(order)))
    if len(order) < 2:
        return
    places = [order.index(node) for node in nodes]
    everyone = range(layout.world_size)
    shift = choose_shift(layout, places, len(order), everyone, racks)

    def cost(shift: int) -> tuple[int, int]:
        turned = [(index + shift) % len(order) for index in range(len(order))]
        return (
            sum(
                bool(rack) and rack == racks[holder]
                for rack, holder in zip(racks, turned, strict=True)
            ),
            sum(
                any(
                    places[peer] == turned[places[rank]]
                    for kind in ("tp", "pp", "dp")
                    for peer in layout.group_of(kind, rank)
                )
                for rank in everyone
            ),
        )

    # Of equals the nearest.
    assert (*cost(shift), shift) == min((*cost(each), each) for each in range(1, len(order)))


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_racks_in_a_row_lose_no_copy_with_a_rack_unless_one_is_more_than_half(
    sizes: list[int],
) -> None:
    racks = [("block", f"rack-{rack}") for rack, size in enumerate(sizes) for _ in range(size)]
    total = len(racks)
    # All nodes share a group.
    shift = choose_shift(Layout(dp=total), range(total), total, range(total), racks)
    num_shared = sum(rack == racks[(index + shift) % total] for index, rack in enumerate(racks))
    assert num_shared == max(0, 2 * max(sizes) - total)


def test_twins_that_are_asked_are_one_near_and_one_far() -> None:
    """Those of neighbours were lost with a rack."""
    nodes = [f"n{rank}" for rank in range(32)]
    placement = place_replicas(Layout(dp=32), nodes, dp_is_sharded=False)
    assert placement.twins_to_ask(0) == (1, 16)
    assert placement.twins_to_ask(31) == (0, 15)


def test_copies_that_would_go_nowhere_are_refused() -> None:
    for shift in (-1, 2, 3):
        with pytest.raises(ValueError, match=f"{shift} places away on 2 nodes"):
            place_replicas(Layout(dp=2), ["a", "b"], dp_is_sharded=True, shift=shift)


def test_rank_without_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match="1 ranks have nodes, of 2"):
        place_replicas(Layout(dp=2), ["a"], dp_is_sharded=True)


def test_ten_thousand_nodes_are_placed_in_seconds() -> None:
    """A controller does it when a job is submitted: work by pairs of nodes would take hours."""
    layout = Layout(tp=2, pp=4, dp=5_000)
    nodes = [f"n{rank // 4}" for rank in range(layout.world_size)]
    for dp_is_sharded in (True, False):
        placement = place_replicas(layout, nodes, dp_is_sharded=dp_is_sharded)
        assert placement.is_copying == dp_is_sharded
        assert all(placement.partners([rank]) for rank in range(0, layout.world_size, 100))
