"""Tracks of ranks, whatever the format: nothing overlaps, and arrows join what belongs together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2

from outlast.cli.trace import committed_marks
from outlast.layout import Layout
from outlast.trace.clocks import ahead_ns, aligned
from outlast.trace.pftrace import parts
from outlast.trace.ranks import TracedRank, cut, traced_ranks
from outlast.trace.stored import StoredRanks
from outlast.trace.tracks import Mark, Overview, Slice, copy_marks, rank_tracks
from outlast.v1 import jobs_pb2, ranks_pb2
from tests.trace.test_timeline import PIPELINE, a_pipeline
from tests.trace.test_trace import MS, a_pass, a_phase, operation, rank_of, step

LAYOUT = Layout(pp=2, dp=2)


def slices_of(ranks: list[TracedRank], name: str, rank: int = 0) -> list[Slice]:
    (found,) = (each for each in rank_tracks(ranks, LAYOUT) if each.rank == rank)
    return [one for track in found.tracks if track.name == name for one in track.slices]


def arrows(ranks: list[TracedRank]) -> list[list[tuple[int, str]]]:
    """Of each flow, what it joins, in order of time."""
    flows: dict[int, list[tuple[int, int, str]]] = {}
    for rank in rank_tracks(ranks, LAYOUT):
        for track in rank.tracks:
            for each in track.slices:
                if each.flow is not None:
                    joined = flows.setdefault(each.flow.number, [])
                    joined.append((each.start_ns, rank.rank, each.name))
    return [[(rank, name) for _, rank, name in sorted(joined)] for joined in flows.values()]


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from(["dp", "tp"])),
        max_size=25,
    )
)
def test_slices_of_a_track_lie_within_or_behind_each_other(
    times: list[tuple[int, int, str]],
) -> None:
    operations = tuple(
        operation(start, start + length, group=group, sequence=number)
        for number, (start, length, group) in enumerate(times)
    )
    (rank,) = rank_tracks([rank_of(0, operations, layout=LAYOUT)], LAYOUT)
    shown: Counter[tuple[int, int]] = Counter()
    for track in rank.tracks:
        ends: list[int] = []
        for each in track.slices:
            while ends and ends[-1] <= each.start_ns:
                ends.pop()
            assert not ends or each.end_ns <= ends[-1]
            ends.append(each.end_ns)
            shown[each.start_ns, each.end_ns] += 1
    assert shown == Counter((each.start_ns, each.end_ns) for each in operations)


def test_ranks_come_in_the_order_of_the_layout() -> None:
    ranks = [rank_of(number, (), layout=LAYOUT) for number in reversed(range(4))]
    # Of the job before, which had more of them.
    ranks.append(replace(rank_of(0, ()), rank=7, at=None, node="n7"))
    found = list(rank_tracks(ranks, LAYOUT))
    assert [each.place for each in found] == [0, 1, 2, 3, 4]
    by_place = sorted(range(4), key=lambda each: (LAYOUT.coordinate(each).pp, each))
    assert [each.rank for each in found] == [*by_place, 7]
    assert found[-1].name == "rank 7 on n7"


def test_an_arrow_joins_the_parts_of_one_collective() -> None:
    dp = LAYOUT.group_of("dp", 0)
    first, other = dp
    ranks = [
        rank_of(first, (operation(3, 9), operation(10, 12, sequence=2)), layout=LAYOUT),
        rank_of(other, (operation(8, 9),), layout=LAYOUT),
    ]
    # The second one is known of one rank only.
    assert arrows(ranks) == [[(first, "all_reduce"), (other, "all_reduce")]]
    flow = slices_of(ranks, "dp", first)[0].flow
    assert flow is not None
    assert (flow.is_first, flow.is_last) == (True, False)


def test_an_arrow_follows_a_micro_batch_through_the_stages() -> None:
    first, last = LAYOUT.group_of("pp", 0)

    def with_passes(number: int, *passes: Any) -> TracedRank:
        steps = (step(1, 0, 50), step(2, 50, 100))
        return replace(rank_of(number, (), steps, layout=LAYOUT), spans=passes)

    ranks = [
        with_passes(
            first,
            a_pass("forward", 1, 5, micro_batch=0),
            a_pass("backward", 30, 40, micro_batch=0),
            a_pass("forward", 51, 55, micro_batch=0),
            # Of a step that is not complete yet.
            a_pass("forward", 101, 105, micro_batch=0),
        ),
        with_passes(
            last,
            a_pass("forward", 6, 10, micro_batch=0),
            a_pass("backward", 10, 20, micro_batch=0),
            a_pass("forward", 21, 25, micro_batch=1),
            a_pass("forward", 106, 110, micro_batch=0),
        ),
    ]
    assert sorted(arrows(ranks)) == [
        [(first, "forward"), (last, "forward")],
        [(first, "forward"), (last, "forward"), (last, "backward"), (first, "backward")],
    ]


def test_an_arrow_leads_from_a_departure_to_its_transfer() -> None:
    """Two messages: one is waited for before it leaves, the other after it has arrived."""
    found = {each.rank: each for each in rank_tracks(a_pipeline(), PIPELINE)}
    sent = {track.name: track.slices for track in found[0].tracks}
    received = {track.name: track.slices for track in found[1].tracks}
    away, first, second = sent["pp under way"], *received["pp"][1::2]
    assert [(each.start_ns // MS, each.end_ns // MS) for each in away] == [(4, 6), (8, 15)]
    # Within the receive that it ends: for 3 ms that waited for its sender.
    assert [each.name for each in received["pp"]] == ["recv", "transfer"] * 2
    assert (first.start_ns, first.end_ns) == (4 * MS + 1, 6 * MS)
    assert received["pp"][0].facts["waited for it (us)"] == 3000
    assert received["pp"][0].facts["peer"] == "rank 0"
    for departure, transfer in zip(away, (first, second), strict=True):
        assert departure.flow is not None
        assert transfer.flow is not None
        assert departure.flow.number == transfer.flow.number
        assert (departure.flow.is_first, transfer.flow.is_last) == (True, True)
        assert departure.start_ns < transfer.start_ns
    # The wait for the end of a send that left before is no part of it.
    assert [each.flow for each in sent["pp"]] == [None, None]


def test_checkpoints_are_marks_when_the_last_rank_went_on() -> None:
    steps = (step(1, 0, 10), step(2, 20, 30), step(3, 30, 40))

    def saved(number: int, until_ms: int) -> TracedRank:
        spans = (a_phase("checkpoint", 10, until_ms), a_phase("checkpoint", 31, 32))
        return replace(rank_of(number, (), steps, layout=LAYOUT), spans=spans)

    overview = Overview([saved(0, 14), saved(1, 17)], LAYOUT)
    marks = [(mark.name, mark.at_ns // MS, mark.facts["ranks"]) for mark in copy_marks(overview)]
    assert marks == [
        ("checkpoint of step 1 taken", 17, "2"),
        ("checkpoint of step 2 taken", 32, "2"),
    ]


def test_every_checkpoint_that_was_committed_within_the_trace_is_a_mark() -> None:
    """Of its steps also one that storage had later; of others what was committed meanwhile."""
    steps = (step(2, 20, 30), step(3, 30, 40))
    overview = Overview([rank_of(0, (), steps, layout=LAYOUT)], LAYOUT)
    committed = {0: 0.015, 1: 0.022, 2: 0.035, 3: 0.070, 4: 0.080}
    history = [
        jobs_pb2.JobCheckpoint(step=number, attempt=1, committed_s=at_s)
        for number, at_s in committed.items()
    ]
    # Of a version that did not note when.
    history.append(jobs_pb2.JobCheckpoint(step=3))
    marks = [mark for mark in committed_marks(history) if overview.shows(mark)]
    assert [(mark.name, mark.at_ns // MS) for mark in marks] == [
        ("checkpoint of step 1 committed", 22),
        ("checkpoint of step 2 committed", 35),
        ("checkpoint of step 3 committed", 70),
    ]
    # An incident may be opened long after ranks stood still.
    assert overview.shows(Mark(name="incident a.i1", at_ns=900 * MS, facts={}))
    assert not overview.shows(Mark(name="incident a.i0", at_ns=19 * MS, facts={}))


def test_ranks_that_are_kept_on_disk_are_the_same() -> None:
    sent = [
        ranks_pb2.ReadTimesResponse(node=f"n{number}", rank=number, times=some_times(number))
        for number in range(4)
    ]
    whole = traced_ranks(sent, LAYOUT)
    ahead = {"n0": 0, "n1": 5, "n2": 0, "n3": -7}
    with StoredRanks(LAYOUT) as stored:
        for each in (sent[3], sent[1], sent[0], sent[2], sent[1]):
            stored.put(each)
        assert list(stored) == whole
        assert stored[1:3] == whole[1:3]
        assert ahead_ns(stored, LAYOUT) == ahead_ns(whole, LAYOUT)
        stored.align(ahead)
        stored.cut(2, 2)
        assert list(stored) == cut(aligned(whole, ahead), 2, 2)


def some_times(number: int) -> ranks_pb2.RankTimes:
    """Two steps with a collective each; the rank is still in the second."""
    times = ranks_pb2.RankTimes()
    for each in (1, 2):
        times.steps.add(step=each, start_ns=100 * each, end_ns=100 * each + 100)
        times.operations.add(
            op="all_reduce",
            group="world",
            sequence=each,
            detail=-1,
            start_ns=100 * each + number,
            end_ns=150 if each == 1 else 0,
        )
    return times


def packets(ranks: list[TracedRank], *marks: Mark) -> list[Any]:
    trace = trace_pb2.Trace()
    for part in parts(ranks, LAYOUT, marks):
        trace.MergeFromString(part)
    return list(trace.packet)


def test_perfetto_has_each_beginning_with_its_end() -> None:
    rank = rank_of(0, (operation(1, 4), operation(4, 4, sequence=2), operation(5, 9, sequence=3)))
    found = packets([rank], Mark(name="incident a.i1", at_ns=6 * MS, facts={"action": "restart"}))
    events = [each for each in found if each.HasField("track_event")]
    kinds = trace_pb2.TrackEvent
    assert [(each.timestamp // MS, each.track_event.type) for each in events] == [
        (5, kinds.TYPE_INSTANT),
        (0, kinds.TYPE_SLICE_BEGIN),
        (3, kinds.TYPE_SLICE_END),
        (3, kinds.TYPE_SLICE_BEGIN),
        (3, kinds.TYPE_SLICE_END),
        (4, kinds.TYPE_SLICE_BEGIN),
        (8, kinds.TYPE_SLICE_END),
    ]
    # A name is written once.
    names = [name.name for each in found for name in each.interned_data.event_names]
    assert names == ["all_reduce"]
    tracks = [each.track_descriptor for each in found if each.HasField("track_descriptor")]
    assert {track.uuid for track in tracks} >= {each.track_event.track_uuid for each in events}
    assert len({track.uuid for track in tracks}) == len(tracks)
