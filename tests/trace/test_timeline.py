"""One step over ranks: whose work, whose waiting, and for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.layout import Layout
from outlast.trace.ranks import (
    OWN_WORK,
    Span,
    TracedOperation,
    TracedRank,
    TracedSpan,
    named_work,
    own_work,
)
from outlast.trace.timeline import Bar, known_steps, timeline
from tests.trace.test_trace import LAYOUT, MS, a_pass, a_phase, operation, rank_of, step


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
    assert shape(first.bars) == [(OWN_WORK, 0, 3), ("all_reduce", 3, 10), (OWN_WORK, 10, 11)]
    assert shape(second.bars) == [(OWN_WORK, 0, 8), ("all_reduce", 8, 10)]
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


PIPELINE = Layout(pp=2)


def a_message(
    name: str, start_ms: float, end_ms: float, *, number: int, departed_ms: float = 0
) -> TracedOperation:
    """One end of a message: a send of stage 0, or the receive of stage 1."""
    found = operation(start_ms, end_ms, name=name, group="pp", sequence=number)
    peer = 1 if name == "send" else 0
    departed_ns = round(departed_ms * MS)
    return replace(found, peer=peer, message=number, departed_ns=departed_ns)


def a_stage(number: int, operations: tuple[TracedOperation, ...], *passes: TracedSpan) -> Any:
    steps = (step(1, 0, 40),)
    return replace(rank_of(number, operations, steps, layout=PIPELINE), spans=passes, known_ns=0)


def a_pipeline() -> list[TracedRank]:
    """Two stages and two forward passes. The first message leaves at 4 ms and takes 2, the second
    leaves at 8 and is there before it is waited for; both stages then meet at the end."""
    first = (
        a_message("send", 20, 21, number=0, departed_ms=4),
        a_message("send", 21, 22, number=2, departed_ms=8),
        operation(30, 31, group="world", sequence=5),
    )
    second = (
        a_message("recv", 1, 6, number=0),
        a_message("recv", 14, 15, number=2),
        operation(10, 31, group="world", sequence=5),
    )
    return [
        a_stage(0, first, a_pass("forward", 0, 4), a_pass("backward", 22, 26)),
        a_stage(1, second, a_pass("forward", 0, 10)),
    ]


def test_a_receive_waits_for_its_sender_and_then_for_the_transfer() -> None:
    (_, track) = timeline(a_pipeline(), PIPELINE, 1).tracks
    first, second = (bar for bar in track.bars if bar.name == "recv")
    assert (first.peer, first.last, first.message) == (0, 0, 0)
    # From 1 ms on it waited; the message left at 4 and was there at 6.
    assert (first.waited_s, first.bubble_s) == pytest.approx((0.003, 0.003))
    assert (first.departed_s, first.hidden_s) == (None, 0)
    # The other one was under way while the stage computed.
    assert (second.waited_s, second.bubble_s) == (0, 0)
    assert (second.departed_s, second.hidden_s) == pytest.approx((0.008, 0.006))


def test_a_send_is_hidden_until_its_receiver_has_it() -> None:
    (track, _) = timeline(a_pipeline(), PIPELINE, 1).tracks
    first, second = (bar for bar in track.bars if bar.name == "send")
    assert (first.peer, first.last, first.waited_s, first.bubble_s) == (1, None, 0, 0)
    # It is waited for long after it has arrived.
    assert (first.departed_s, first.hidden_s) == pytest.approx((0.004, 0.002))
    assert (second.departed_s, second.hidden_s) == pytest.approx((0.008, 0.007))


def test_bubble_exposed_and_hidden_communication_are_summed_up() -> None:
    first, second = timeline(a_pipeline(), PIPELINE, 1).tracks
    assert first.step_s == second.step_s == pytest.approx(0.04)
    # Two sends and its own part of what both meet in.
    assert (first.bubble_s, first.exposed_s) == pytest.approx((0, 0.003))
    # From 4 to 6 and from 8 to 15 ms.
    assert first.hidden_s == pytest.approx(0.009)
    # 1 to 4 ms for the first message, and 10 to 26 for the other stage's last pass.
    assert second.bubble_s == pytest.approx(0.019)
    # 1 to 6 and 10 to 31 ms it stood still, and the receive lies within that.
    assert second.exposed_s == pytest.approx(0.026 - 0.019)
    # What left at 8 ms was hidden until it stood still anyway.
    assert second.hidden_s == pytest.approx(0.002)


def test_a_wait_for_a_rank_of_the_same_stage_is_no_bubble() -> None:
    first, second = timeline(RANKS, LAYOUT, 2).tracks
    assert (first.bubble_s, second.bubble_s) == (0, 0)
    assert first.exposed_s == pytest.approx(0.007)


def test_a_receive_whose_sender_is_not_known_is_all_bubble() -> None:
    (track,) = timeline(a_pipeline()[1:], PIPELINE, 1).tracks
    first, second = (bar for bar in track.bars if bar.name == "recv")
    assert (first.peer, first.last) == (0, None)
    assert first.bubble_s == pytest.approx(0.005)
    assert second.bubble_s == pytest.approx(0.001)


def test_only_whole_steps_are_known() -> None:
    assert known_steps(RANKS) == [2]
    without = rank_of(0, (), (step(1, 0, 10), step(2, 10, 20)))
    assert known_steps([without]) == [1, 2]
    assert known_steps([]) == []


def test_ranks_that_have_not_done_the_step_have_no_track() -> None:
    behind = rank_of(1, (operation(8, 10),), (step(1, 0, 10),))
    assert [track.rank for track in timeline([RANKS[0], behind], LAYOUT, 2).tracks] == [0]
    assert timeline([], LAYOUT, 2).tracks == ()


def test_work_has_the_name_of_its_pass_or_else_of_its_phase() -> None:
    rank = replace(
        rank_of(0, (operation(0, 1), operation(4, 6, name="recv", group="pp")), (step(1, 1, 20),)),
        spans=(
            a_phase("data", 1, 2),
            a_pass("forward", 3, 9, micro_batch=2, chunk=1),
            a_phase("forward_backward", 2, 11),
            a_phase("optimizer", 11, 15),
        ),
    )
    (track,) = timeline([rank], LAYOUT, 1).tracks
    assert shape(track.bars) == [
        ("data", 0, 1),
        # Before the pass, which then waits in the middle.
        ("forward_backward", 1, 2),
        ("forward", 2, 3),
        ("recv", 3, 5),
        ("forward", 5, 8),
        ("forward_backward", 8, 10),
        ("optimizer", 10, 14),
        # A phase that has not ended has no length yet.
        (OWN_WORK, 14, 19),
    ]
    passes = [(bar.detail, bar.chunk) for bar in track.bars if bar.name == "forward"]
    assert passes == [(2, 1), (2, 1)]
    assert {bar.detail for bar in track.bars if bar.name == "optimizer"} == {-1}


def test_phases_name_nothing_where_a_device_is_behind_them() -> None:
    rank = replace(
        rank_of(0, (operation(-1, 0),), (step(1, 0, 20),)),
        spans=(
            a_phase("forward_backward", 0, 2),
            a_pass("forward", 1, 6),
            a_phase("gradient_sync", 2, 20),
            a_pass("backward", 7, 15),
        ),
    )
    (track,) = timeline([rank], LAYOUT, 1).tracks
    names = [bar.name for bar in track.bars]
    assert names == [OWN_WORK, "forward", OWN_WORK, "backward", OWN_WORK]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_work_is_cut_up_and_nothing_of_it_lost_or_counted_twice(data: st.DataObject) -> None:
    def spans_of(name: str, *, is_pass: bool) -> list[TracedSpan]:
        edges = sorted(data.draw(st.sets(st.integers(0, 100), max_size=12)))
        pairs = zip(edges[::2], edges[1::2], strict=False)
        make = a_pass if is_pass else a_phase
        return [make(name, *pair) for pair in pairs]

    edges = sorted(data.draw(st.sets(st.integers(1, 100), max_size=10)))
    operations = [operation(*pair) for pair in zip(edges[::2], edges[1::2], strict=False)]
    passes = spans_of("forward", is_pass=True)
    phases = spans_of("data", is_pass=False)
    rank = replace(
        rank_of(0, (operation(-1, 0), *operations), (step(1, 0, 100),)),
        spans=(*passes, *phases),
    )
    found = named_work(rank, 1)
    moments = [moment for each in found for moment in range(each.start_ns // MS, each.end_ns // MS)]
    busy = {moment for each in own_work(rank, 1) for moment in _moments(each)}
    assert sorted(moments) == sorted(busy)
    in_pass = {moment for each in passes for moment in _moments(each)}
    in_phase = {moment for each in phases for moment in _moments(each)} - in_pass
    if any(each.start_ns // MS in _moments(phase) for each in passes for phase in phases):
        # No pass begins in a phase that it is not of: the phases are those of another clock.
        in_phase = set()
    for each in found:
        inside = {"forward": in_pass, "data": in_phase}.get(each.name, busy - in_pass - in_phase)
        assert set(_moments(each)) <= inside


def _moments(span: Span) -> range:
    return range(span.start_ns // MS, span.end_ns // MS)
