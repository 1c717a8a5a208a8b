"""The layout of ranks: tp fastest, then dp, then pp."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.layout import Coordinate, Layout

layouts = st.builds(Layout, tp=st.integers(1, 6), pp=st.integers(1, 6), dp=st.integers(1, 6))


@given(layouts)
def test_every_rank_has_its_own_coordinate(layout: Layout) -> None:
    coordinates = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert len(set(coordinates)) == layout.world_size
    assert [layout.rank(at) for at in coordinates] == list(range(layout.world_size))


@given(layouts)
def test_groups_of_each_kind_partition_the_ranks(layout: Layout) -> None:
    for groups in (layout.tp_groups(), layout.dp_groups(), layout.pp_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))


@given(layouts, st.data())
def test_group_of_agrees_with_the_full_lists(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.group_of("tp", rank) in layout.tp_groups()
    assert layout.group_of("dp", rank) in layout.dp_groups()
    assert layout.group_of("pp", rank) in layout.pp_groups()
    for kind in ("tp", "dp", "pp"):
        assert rank in layout.group_of(kind, rank)


def test_tensor_group_is_contiguous_and_data_group_comes_next() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    assert layout.tp_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.dp_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.pp_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.coordinate(6) == Coordinate(pp=1, dp=1, tp=0)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_experts_are_divided_among_ranks_next_to_each_other(
    ep: int, holders: int, tp: int, pp: int
) -> None:
    layout = Layout(tp=tp, pp=pp, dp=ep * holders, ep=ep)
    for rank in range(layout.world_size):
        dividing, holding = (layout.group_of(kind, rank) for kind in ("ep", "expert_dp"))
        assert dividing in layout.ep_groups()
        # Each of the replicas is reached over one of both.
        assert set(dividing) & set(holding) == {rank}
        assert len(dividing) * len(holding) == layout.dp
        assert {*dividing, *holding} <= set(layout.group_of("dp", rank))
        assert dividing[-1] - dividing[0] == (ep - 1) * tp


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_ranks_of_a_replica_that_divide_sequences_come_right_after_tensor_ranks(
    cp: int, replicas: int, tp: int, pp: int
) -> None:
    layout = Layout(tp=tp, pp=pp, dp=cp * replicas, cp=cp)
    assert layout.num_replicas == replicas
    for rank in range(layout.world_size):
        group = layout.group_of("cp", rank)
        assert group in layout.cp_groups()
        assert set(group) <= set(layout.group_of("dp", rank))
        assert {layout.replica(each) for each in group} == {layout.replica(rank)}
        assert group[-1] - group[0] == (cp - 1) * tp


@pytest.mark.parametrize("degree", ["tp", "pp", "dp", "ep", "cp"])
def test_degree_below_one_is_refused_by_name(degree: str) -> None:
    with pytest.raises(ValueError, match=f"parallel.{degree} is 0"):
        Layout(**{degree: 0})


def test_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 8 is not in 0\.\.7"):
        Layout(tp=2, pp=2, dp=2).coordinate(8)


def test_a_world_of_another_size_has_other_replicas_where_it_has_whole_ones() -> None:
    layout = Layout(tp=2, pp=3, dp=4, cp=2)
    assert layout.of_world(12) == Layout(tp=2, pp=3, dp=2, cp=2)
    # A part of a pipeline, and one rank of two that divide a sequence.
    for num_ranks in (0, 13, 6):
        assert layout.of_world(num_ranks) == layout
