"""One step over ranks: whose work, whose waiting, and for whom."""

from __future__ import annotations

import pytest

from outlast.layout import Layout
from outlast.trace.timeline import WORK, Bar, known_steps, timeline
from tests.trace.test_trace import LAYOUT, operation, rank_of, step


def shape(bars: tuple[Bar, ...]) -> list[tuple[str, float, float]]:
    return [(bar.name, round(1e3 * bar.begun_s, 3), round(1e3 * bar.ended_s, 3)) for bar in bars]


RANKS = [
    # Rank 0 is early in step 2 and waits for rank 1.
    rank_of(
        0,
        (operation(8, 10), operation(13, 20, sequence=2)),
        (step(1, 0, 10), step(2, 10, 21)),
    ),
    rank_of(
        1,
        (operation(9, 10), operation(18, 20, sequence=2)),
        (step(1, 0, 10), step(2, 10, 20)),
    ),
]


def test_a_step_is_work_and_operations_in_order() -> None:
    found = timeline(RANKS, LAYOUT, 2)
    first, second = found.tracks
    assert shape(first.bars) == [(WORK, 0, 3), ("all_reduce", 3, 10), (WORK, 10, 11)]
    assert shape(second.bars) == [(WORK, 0, 8), ("all_reduce", 8, 10)]
    assert found.length_s == pytest.approx(0.011)
    assert (found.begun_ns, found.step, found.apart_s) == (10_000_000, 2, 0)
    assert [(track.rank, track.node, track.pp) for track in found.tracks] == [
        (0, "n0", 0),
        (1, "n1", 0),
    ]


def test_who_began_last_is_named_and_how_long_the_others_waited() -> None:
    (first, second) = (track.bars[1] for track in timeline(RANKS, LAYOUT, 2).tracks)
    assert (first.last, first.waited_s) == (1, pytest.approx(0.005))
    assert (second.last, second.waited_s) == (1, 0)


def test_for_a_send_nobody_is_named() -> None:
    layout = Layout(pp=2)
    rank = rank_of(
        0,
        (operation(1, 2, name="send", group="pp"),),
        (step(1, 0, 5),),
        layout=layout,
    )
    (sent,) = (bar for bar in timeline([rank], layout, 1).tracks[0].bars if bar.group)
    assert (sent.name, sent.last, sent.waited_s) == ("send", None, 0)


def test_only_whole_steps_are_known() -> None:
    assert known_steps(RANKS) == [2]
    without = rank_of(0, (), (step(1, 0, 10), step(2, 10, 20)))
    assert known_steps([without]) == [1, 2]
    assert known_steps([]) == []


def test_ranks_that_have_not_done_the_step_have_no_track() -> None:
    behind = rank_of(1, (operation(8, 10),), (step(1, 0, 10),))
    assert [track.rank for track in timeline([RANKS[0], behind], LAYOUT, 2).tracks] == [0]
    assert timeline([], LAYOUT, 2).tracks == ()
