"""What ranks noted, as a trace: whose work and whose waiting, by one clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.layout import Layout
from outlast.trace.clocks import KnownClock, ahead_ns, aligned
from outlast.trace.events import events
from outlast.trace.ranks import (
    TracedOperation,
    TracedRank,
    TracedSpan,
    TracedStep,
    cut,
    own_work,
    traced_ranks,
)
from outlast.trace.timeline import known_steps
from outlast.trace.tracks import Mark
from outlast.v1 import ranks_pb2

MS = 1_000_000
LAYOUT = Layout(dp=2)


def operation(
    start_ms: float,
    end_ms: float,
    *,
    name: str = "all_reduce",
    group: str = "dp",
    sequence: int = 1,
) -> TracedOperation:
    return TracedOperation(
        name=name,
        group=group,
        sequence=sequence,
        detail=-1,
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
    )


def step(number: int, start_ms: float, end_ms: float) -> TracedStep:
    start_ns, end_ns = round(start_ms * MS), round(end_ms * MS)
    return TracedStep(name=f"step {number}", step=number, start_ns=start_ns, end_ns=end_ns)


def a_phase(name: str, start_ms: float, end_ms: float, *, waited_ms: float = 0) -> TracedSpan:
    return TracedSpan(
        name=name,
        is_pass=False,
        chunk=0,
        micro_batch=-1,
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
        waited_ns=round(waited_ms * MS),
    )


def a_pass(
    name: str,
    start_ms: float,
    end_ms: float,
    *,
    micro_batch: int = 0,
    chunk: int = 0,
    waited_ms: float = 0,
) -> TracedSpan:
    phase = a_phase(name, start_ms, end_ms, waited_ms=waited_ms)
    return replace(phase, is_pass=True, micro_batch=micro_batch, chunk=chunk)


def rank_of(
    number: int,
    operations: tuple[TracedOperation, ...],
    steps: tuple[TracedStep, ...] = (),
    *,
    node: str = "",
    layout: Layout = LAYOUT,
) -> TracedRank:
    return TracedRank(
        rank=number,
        node=node or f"n{number}",
        at=layout.coordinate(number),
        operations=operations,
        steps=steps,
    )


def spans(ranks: list[TracedRank], thread: str) -> list[tuple[int, float, float]]:
    """Rank, beginning and length of what is on a thread, in milliseconds."""
    found = list(events(ranks, LAYOUT))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found
        if event["name"] == "thread_name"
    }
    return [
        (event["pid"], event["ts"] / 1000, event["dur"] / 1000)
        for event in found
        if event["ph"] == "X" and names[event["pid"], event["tid"]] == thread
    ]


def test_work_is_what_lies_in_a_step_and_in_no_operation() -> None:
    rank = rank_of(
        0,
        (operation(10, 12), operation(20, 25, sequence=2), operation(31, 32, sequence=3)),
        (step(1, 10, 30), step(2, 30, 40)),
    )
    assert [(each.start_ns / MS, each.end_ns / MS) for each in own_work(rank, 1)] == [
        (12, 20),
        (25, 30),
        (30, 31),
        (32, 40),
    ]


def test_of_steps_before_the_first_known_operation_nothing_is_said() -> None:
    rank = rank_of(0, (operation(25, 26),), (step(1, 0, 10), step(2, 10, 30)))
    assert [(each.start_ns / MS, each.end_ns / MS) for each in own_work(rank, 1)] == [(26, 30)]


def test_a_collective_names_who_began_it_last() -> None:
    ranks = [rank_of(0, (operation(10, 31),)), rank_of(1, (operation(30, 31),))]
    (first, second) = (each for each in events(ranks, LAYOUT) if each["ph"] == "X")
    assert first["args"]["last to begin"] == "rank 1"
    assert first["args"]["waited for it (us)"] == pytest.approx(20_000)
    assert second["args"]["waited for it (us)"] == 0


def test_ranks_have_threads_for_steps_work_and_each_group() -> None:
    rank = rank_of(
        0, (operation(0, 1), operation(2, 3, group="tp", name="all_gather")), (step(1, 0, 5),)
    )
    assert spans([rank], "steps") == [(0, 0, 5)]
    assert spans([rank], "own work") == [(0, 1, 1), (0, 3, 2)]
    assert spans([rank], "dp") == [(0, 0, 1)]
    assert spans([rank], "tp") == [(0, 2, 1)]


def meetings(other_began_last: bool, sequences: range, group: str) -> tuple[TracedOperation, ...]:
    """One side of collectives of two ranks: each begins last half of the time, 1 ms before the
    end, and the other one 5 ms before it."""
    return tuple(
        operation(
            10 * each - (5 if (each % 2 == 0) == other_began_last else 1),
            10 * each,
            group=group,
            sequence=each,
        )
        for each in sequences
    )


def test_clocks_of_nodes_are_put_beside_each_other_by_what_ends_together() -> None:
    layout = Layout(pp=2, dp=2)
    # Node n2 meets n0 through n1 only.
    dp, world = range(1, 9), range(11, 19)
    both = meetings(False, dp, "dp") + meetings(True, world, "world")
    true = [
        rank_of(0, meetings(True, dp, "dp"), layout=layout),
        rank_of(1, both, layout=layout),
        rank_of(2, meetings(False, world, "world"), layout=layout),
    ]
    wrong = {"n0": 0, "n1": 700 * MS, "n2": -300 * MS}
    seen = aligned(true, {node: -by for node, by in wrong.items()})
    found = ahead_ns(seen, layout)
    # As closely as the last rank's part of a collective is short, and no further.
    for node, by_ns in wrong.items():
        assert abs(found[node] - by_ns) <= 2 * MS
    assert aligned(seen, wrong) == true


def test_clocks_follow_from_when_messages_left_and_not_from_when_they_were_waited_for() -> None:
    """Rank 1 waits for what left long before, when rank 0 has had its part of it already."""
    first = operation(10, 12)
    second = replace(operation(20, 21), departed_ns=9 * MS)
    assert ahead_ns([rank_of(0, (first,)), rank_of(1, (second,))], LAYOUT) == {"n0": 0, "n1": 0}
    late = operation(20, 21)
    assert ahead_ns([rank_of(0, (first,)), rank_of(1, (late,))], LAYOUT)["n1"] > 0


def test_clocks_that_may_be_the_same_are_left_as_they_are() -> None:
    # Rank 1 notices each end 3 ms late.
    first = tuple(operation(10 * each, 10 * each + 4, sequence=each) for each in range(1, 9))
    second = tuple(operation(10 * each + 3, 10 * each + 7, sequence=each) for each in range(1, 9))
    assert ahead_ns([rank_of(0, first), rank_of(1, second)], LAYOUT) == {"n0": 0, "n1": 0}


def test_a_node_that_meets_nobody_keeps_its_clock() -> None:
    ranks = [rank_of(0, (operation(0, 1),)), rank_of(1, ())]
    assert ahead_ns(ranks, LAYOUT) == {"n0": 0, "n1": 0}
    assert ahead_ns([], LAYOUT) == {}


def test_a_node_that_meets_nobody_is_put_where_heartbeats_say() -> None:
    first = (operation(0, 10, sequence=1), operation(20, 30, sequence=2))
    layout = Layout(pp=2, dp=2)
    ranks = [
        rank_of(0, first, layout=layout),
        # By collectives, 0 to 20 ms apart from it in either way.
        rank_of(1, first, layout=layout),
        rank_of(2, (), layout=layout),
        rank_of(3, (), layout=layout),
    ]
    clocks = {
        "n0": KnownClock(ahead_ns=100 * MS, error_ns=MS),
        "n1": KnownClock(ahead_ns=108 * MS, error_ns=MS),
        "n2": KnownClock(ahead_ns=-500 * MS, error_ns=MS),
    }
    found = ahead_ns(ranks, layout, clocks)
    # Both hold for n1; nothing is known of n3.
    assert found == {"n0": 0, "n1": 8 * MS, "n2": -600 * MS, "n3": 0}
    # Heartbeats that contradict collectives are of another time.
    wrong = {**clocks, "n1": KnownClock(ahead_ns=9_000 * MS, error_ns=MS)}
    assert ahead_ns(ranks, layout, wrong)["n1"] == 0
    # The error of both nodes counts.
    loose = {**clocks, "n1": KnownClock(ahead_ns=108 * MS, error_ns=7 * MS)}
    assert ahead_ns(ranks, layout, loose)["n1"] == 0


def test_nodes_that_meet_each_other_stay_together_where_heartbeats_put_one() -> None:
    layout = Layout(pp=2, dp=2)
    pair = tuple(operation(10 * each, 10 * each + 1, sequence=each) for each in range(1, 9))
    late = tuple(operation(10 * each + 50, 10 * each + 51, sequence=each) for each in range(1, 9))
    ranks = [
        rank_of(0, (), layout=layout),
        rank_of(2, pair, layout=layout),
        rank_of(3, late, layout=layout),
    ]
    clocks = {
        "n0": KnownClock(ahead_ns=0, error_ns=MS),
        "n2": KnownClock(ahead_ns=300 * MS, error_ns=MS),
    }
    assert ahead_ns(ranks, layout, clocks) == {"n0": 0, "n2": 300 * MS, "n3": 350 * MS}


def test_only_some_steps_are_cut_out() -> None:
    rank = rank_of(
        0,
        (operation(0, 1), operation(12, 13, sequence=2), operation(25, 26, sequence=3)),
        (step(1, 0, 10), step(2, 10, 20), step(3, 20, 30)),
    )
    (found,) = cut([rank], 2, 2)
    assert [each.name for each in found.steps] == ["step 2"]
    assert [each.sequence for each in found.operations] == [2]


def test_work_before_the_first_operation_of_what_is_cut_out_is_there() -> None:
    rank = rank_of(
        0,
        (operation(0, 1), operation(12, 13, sequence=2)),
        (step(1, 0, 10), step(2, 10, 20)),
    )
    assert spans(cut([rank], 2, 2), "own work") == [(0, 0, 2), (0, 3, 7)]


def test_phases_and_passes_have_threads_of_their_own() -> None:
    rank = replace(
        rank_of(0, (operation(2, 3),), (step(1, 0, 10), step(2, 10, 20))),
        spans=(
            a_pass("forward", 1, 4, micro_batch=3, chunk=1, waited_ms=1),
            a_phase("forward_backward", 0, 5, waited_ms=1),
            replace(a_phase("optimizer", 5, 6), is_over=False),
            a_pass("forward", 11, 14),
        ),
    )
    assert spans([rank], "phases") == [(0, 0, 5), (0, 5, 1)]
    assert spans([rank], "passes") == [(0, 1, 3), (0, 11, 3)]
    assert spans(cut([rank], 2, 2), "passes") == [(0, 1, 3)]
    assert spans(cut([rank], 2, 2), "phases") == []
    found = {event["name"]: event.get("args") for event in events([rank], LAYOUT)}
    assert found["forward_backward"] == {"waited (us)": 1000}
    assert "optimizer (not left)" in found
    first = next(event for event in events([rank], LAYOUT) if event["name"] == "forward")
    assert first["args"] == {"waited (us)": 1000, "micro-batch": 3, "chunk": 1}


def test_clocks_move_phases_and_passes_as_well() -> None:
    rank = rank_of(0, (), (step(1, 0, 10),))
    rank = replace(rank, spans=(a_phase("data", 1, 4),), known_ns=5 * MS)
    (moved,) = aligned([rank], {"n0": MS})
    assert (moved.spans, moved.known_ns) == ((a_phase("data", 0, 3),), 4 * MS)


def test_what_an_agent_has_left_out_is_known_all_the_same() -> None:
    rank = rank_of(0, (operation(12, 13),), (step(1, 0, 10), step(2, 10, 20)))
    assert known_steps([rank]) == []
    # It has operations since the first step, and sent those of the second.
    rank = replace(rank, known_ns=0)
    assert known_steps([rank]) == [1, 2]
    (found,) = cut([rank], 2, 2)
    assert [(each.start_ns / MS, each.end_ns / MS) for each in own_work(found, 1)] == [
        (10, 12),
        (13, 20),
    ]


def test_marks_are_of_the_whole_trace() -> None:
    mark = Mark(name="incident a.i1", at_ns=5 * MS, facts={"action": "restart"})
    *_, last = events([rank_of(0, (operation(1, 2),))], LAYOUT, [mark])
    assert (last["ph"], last["s"], last["ts"]) == ("i", "g", 4000)


def test_ranks_are_read_as_the_controller_sends_them() -> None:
    first = ranks_pb2.ReadTimesResponse(node="n1", rank=1)
    first.times.operations.add(op="send", group="pp", sequence=4, detail=2, start_ns=1, end_ns=3)
    first.times.operations.add(op="all_reduce", group="dp", sequence=9, detail=-1, start_ns=4)
    first.times.steps.add(step=7, start_ns=0, end_ns=5)
    first.times.spans.add(
        phase="forward_backward", work="forward", chunk=1, micro_batch=2, start_ns=1, end_ns=3
    )
    first.times.spans.add(phase="forward_backward", micro_batch=-1, start_ns=1, waited_ns=0)
    # The job had more ranks then.
    gone = ranks_pb2.ReadTimesResponse(node="n2", rank=2)
    rank, other = traced_ranks([gone, first], LAYOUT)
    assert (rank.at, rank.node, other.at) == (LAYOUT.coordinate(1), "n1", None)
    assert rank.operations[0].detail == 2
    assert rank.steps == (TracedStep(name="step 7", step=7, start_ns=0, end_ns=5),)
    computed, phase = rank.spans
    assert (computed.name, computed.is_pass, computed.chunk) == ("forward", True, 1)
    assert (computed.micro_batch, computed.is_over) == (2, True)
    assert (phase.name, phase.is_pass, phase.is_over) == ("forward_backward", False, False)
    # It is still inside.
    assert phase.end_ns == 5
    assert (rank.operations[1].end_ns, rank.operations[1].is_over) == (5, False)
    names = [event["name"] for event in events([rank], LAYOUT) if event["ph"] == "X"]
    assert names[-1] == "all_reduce (not left)"
