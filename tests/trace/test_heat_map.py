"""Ranks by steps: in which order, together with whom, and who is an outlier among equal peers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest

from outlast.layout import Layout
from outlast.trace.heat import Alike, Measure, Order, kind_of, node_stride
from outlast.trace.heat_map import HeatMap, Row


def of_times(
    layout: Layout,
    times: Sequence[Sequence[float]],
    *,
    order: Order = Order.RANK,
    rows: int = 1000,
    steps: int = 1000,
    per_node: int = 1,
) -> HeatMap:
    """Each rank's steps from 1 on."""
    found = HeatMap(
        measure=Measure.STEP,
        num_ranks=layout.world_size,
        layout=layout,
        most_rows=rows,
        most_steps=steps,
        order=order,
    )
    for rank, seconds in enumerate(times):
        found.put(rank, f"n{rank // per_node}", range(1, len(seconds) + 1), seconds)
    return found


def known(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(each) else pytest.approx(each) for each in values]


def outlying(rows: Sequence[Row]) -> dict[int, tuple[tuple[int, int], ...]]:
    return {row.ranks[0]: row.outliers for row in rows if row.outliers}


def test_only_the_newest_steps_are_shown_and_what_is_not_known_is_no_number() -> None:
    found = of_times(Layout(dp=2), [[0.01] * 8, [0.01] * 6], steps=4)
    assert found.steps() == [5, 6, 7, 8]
    assert [known(row.seconds) for row in found.rows()] == [[0.01] * 4, [0.01, 0.01, None, None]]
    assert [known(row.ratios) for row in found.rows()] == [[1] * 4, [1, 1, None, None]]


def test_a_step_that_was_done_again_is_shown_as_it_was_the_last_time() -> None:
    found = of_times(Layout(), [])
    found.put(0, "n0", [1, 2, 3, 2, 3], [0.1, 0.2, 0.3, 0.5, 0.6])
    assert found.steps() == [1, 2, 3]
    assert found.rows()[0].seconds == pytest.approx([0.1, 0.5, 0.6])


def test_many_ranks_share_rows_which_have_the_one_that_is_furthest_above() -> None:
    times = [[0.001 + number / 2000] for number in range(10)]
    rows = of_times(Layout(dp=10), times, rows=4).rows()
    assert [row.ranks for row in rows] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)]
    assert [row.seconds[0] for row in rows] == pytest.approx([0.002, 0.0035, 0.005, 0.0055])
    # Against rank 4, the lower one of the two in the middle.
    assert [row.ratios[0] for row in rows] == pytest.approx([2 / 3, 3.5 / 3, 5 / 3, 5.5 / 3])
    assert [(row.node, row.pp, row.slowest) for row in rows[:2]] == [("n0", 0, 2), ("n3", 0, 5)]


def test_ranks_that_say_nothing_have_no_row() -> None:
    found = of_times(Layout(dp=4), [])
    assert found.rows() == []
    found.put(3, "n3", [1], [0.1])
    assert [row.ranks for row in found.rows()] == [(3,)]


def test_rows_are_in_the_order_of_ranks_nodes_or_positions() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    times = [[0.1]] * 12
    ranks = {
        order: [row.ranks[0] for row in of_times(layout, times, order=order).rows()]
        for order in Order
    }
    assert ranks[Order.RANK] == [*range(12)]
    # n10 and n11 come behind n9.
    assert ranks[Order.NODE] == [*range(12)]
    # The ranks of a replica, first stage first: those of the second are six further on.
    assert ranks[Order.POSITION] == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_rows_of_several_ranks_are_whole_nodes_or_replicas_or_parts_of_them() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    times = [[0.1]] * 12

    def ranks(order: Order, rows: int) -> list[tuple[int, ...]]:
        found = of_times(layout, times, order=order, rows=rows, per_node=4)
        return [row.ranks for row in found.rows()]

    assert ranks(Order.NODE, 3) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert ranks(Order.NODE, 6)[:3] == [(0, 1), (2, 3), (4, 5)]
    assert ranks(Order.NODE, 2) == [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11)]
    assert ranks(Order.POSITION, 3) == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    # A part of a replica is a stage of it.
    assert ranks(Order.POSITION, 7)[:2] == [(0, 1), (6, 7)]
    for order in Order:
        for rows in range(1, 13):
            found = ranks(order, rows)
            assert len(found) <= rows
            assert sorted(rank for row in found for rank in row) == [*range(12)]


def test_stages_are_measured_each_against_its_own() -> None:
    """The second stage takes three times as long, and one of its ranks a quarter longer."""
    layout = Layout(pp=2, dp=4)
    times = [[0.1] * 3] * 4 + [[0.3] * 3] * 3 + [[0.3, 0.375, 0.375]]
    found = of_times(layout, times)
    assert found.alike == (Alike.STAGE,)
    assert outlying(found.rows()) == {7: ((1, 2),)}
    # Put together with ranks of the other stage it is still found.
    (row,) = of_times(layout, times, rows=1).rows()
    assert (row.slowest, row.outliers) == (7, ((1, 2),))
    assert row.ratios == pytest.approx([1, 1.25, 1.25])


def test_ranks_with_other_experts_are_no_peers() -> None:
    """Every second replica holds experts that have twice the work."""
    layout = Layout(dp=6, ep=2)
    times = [[0.2 if dp % 2 else 0.1] for dp in range(6)]
    found = of_times(layout, times)
    assert found.alike == (Alike.EXPERTS,)
    assert outlying(found.rows()) == {}
    # Where each set of experts is held once, nobody has an equal peer but by stage.
    assert of_times(Layout(dp=6, ep=6), times).alike == ()
    times[3] = [0.3]
    assert outlying(of_times(layout, times).rows()) == {3: ((0, 1),)}


def test_noise_is_no_outlier_and_what_stands_out_of_it_is() -> None:
    random = Random(1)
    times = [[random.gauss(1, 0.1) for _ in range(200)] for _ in range(64)]
    times[5][100:110] = [2.0] * 10
    assert outlying(of_times(Layout(dp=64), times).rows()) == {5: ((100, 10),)}


def test_less_than_a_millisecond_is_no_outlier_and_nobody_is_one_alone() -> None:
    assert outlying(of_times(Layout(dp=3), [[1e-4], [1e-4], [8e-4]]).rows()) == {}
    assert outlying(of_times(Layout(pp=2), [[0.1], [0.9]]).rows()) == {}


def test_where_peers_take_no_time_who_does_is_far_above_them() -> None:
    rows = of_times(Layout(dp=3), [[0.0], [0.0], [0.5]]).rows()
    assert [float(row.ratios[0]) for row in rows] == [1, 1, 2]
    assert outlying(rows) == {2: ((0, 1),)}


@pytest.mark.parametrize(
    ("layout", "stride"),
    [
        (Layout(dp=10_000), 20),
        (Layout(tp=8, dp=1280), 20),
        # 20 nodes have a stage: of one in 20 each would be its own median.
        (Layout(tp=8, pp=64, dp=20), 6),
        (Layout(tp=8, pp=64, dp=3), 1),
        # With one node in 20, those of 16 of the 64 sets of experts, four of each.
        (Layout(tp=8, dp=1280, ep=64), 20),
        (Layout(tp=8, dp=10), 1),
    ],
)
def test_a_part_of_the_nodes_has_three_of_each_kind_of_work(layout: Layout, stride: int) -> None:
    assert node_stride(layout, 8, 512) == stride
    assert node_stride(layout, 8, 0) == 1


def test_a_slow_node_is_as_slow_in_the_part_as_in_the_whole() -> None:
    layout = Layout(tp=8, pp=64, dp=20)
    stride = node_stride(layout, 8, 512)
    slow = 10 * stride
    ratios = []
    for nodes in (range(0, layout.world_size // 8, stride), range(layout.world_size // 8)):
        found = HeatMap(
            measure=Measure.WORK,
            num_ranks=layout.world_size,
            layout=layout,
            most_rows=layout.world_size,
            most_steps=1,
        )
        for node in nodes:
            for rank in range(8 * node, 8 * node + 8):
                found.put(rank, f"n{node}", [1], [1.6 if node == slow else 1.0])
        ratios.append([row.mean_ratio for row in found.rows() if row.node == f"n{slow}"])
    assert ratios[0] == ratios[1] == [pytest.approx(1.6)] * 8


def test_a_rank_beyond_the_layout_is_of_no_kind() -> None:
    layout = Layout(tp=2, pp=2, dp=4, ep=2)
    assert kind_of(16, layout) is None
    assert [kind_of(rank, layout) for rank in (0, 2, 5, 8)] == [(0, 0), (0, 1), (0, 0), (1, 0)]
