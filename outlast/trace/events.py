"""A trace in the Trace Event Format, which Perfetto and Chrome open. Pure.

A process for each rank, sorted by its place in the layout, and in it a thread for each track.

Source: "Trace Event Format", Google, the description of `chrome://tracing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outlast.layout import Layout
from outlast.trace.ranks import TracedRank
from outlast.trace.tracks import Flow, Mark, Overview, RankTracks, Slice, Track, rank_tracks


def events(
    ranks: Sequence[TracedRank],
    layout: Layout,
    marks: Sequence[Mark] = (),
    overview: Overview | None = None,
) -> Iterator[dict[str, Any]]:
    """Every event of the trace; times are in microseconds since the first."""
    known = overview or Overview(ranks, layout)
    zero_ns, shown = known.first_ns, 0
    for rank in rank_tracks(ranks, layout, known):
        shown = rank.rank
        yield from _names(rank)
        for thread, track in _threads(rank):
            for each in track.slices:
                yield _event(rank, thread, each, zero_ns)
    for mark in marks:
        yield {
            "ph": "i",
            "s": "g",
            "name": mark.name,
            "ts": (mark.at_ns - zero_ns) / 1000,
            "pid": shown,
            "tid": 1 + shown,
            "args": dict(mark.facts),
        }


def _threads(rank: RankTracks) -> Iterator[tuple[int, Track]]:
    """Each track with its thread's number: 0 and the process's own stand for its main thread."""
    return enumerate(rank.tracks, rank.rank + 1)


def _names(rank: RankTracks) -> Iterator[dict[str, Any]]:
    yield _fact(rank, rank.rank + 1, "process_name", name=rank.name)
    yield _fact(rank, rank.rank + 1, "process_sort_index", sort_index=rank.place)
    for thread, track in _threads(rank):
        yield _fact(rank, thread, "thread_name", name=track.name)
        yield _fact(rank, thread, "thread_sort_index", sort_index=thread)


def _fact(rank: RankTracks, thread: int, kind: str, **facts: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank.rank, "tid": thread, "name": kind, "args": facts}


def _event(rank: RankTracks, thread: int, shown: Slice, zero_ns: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "pid": rank.rank,
        "tid": thread,
        "name": shown.name,
        "ts": (shown.start_ns - zero_ns) / 1000,
        "dur": max(0, shown.end_ns - shown.start_ns) / 1000,
    }
    if shown.facts:
        event["args"] = dict(shown.facts)
    if shown.flow is not None:
        event |= _arrows(shown.flow)
    return event


def _arrows(flow: Flow) -> dict[str, Any]:
    """From the slice before of the same flow, and to the next one."""
    arrows: dict[str, Any] = {"bind_id": f"{flow.number:#x}"}
    if not flow.is_first:
        arrows["flow_in"] = True
    if not flow.is_last:
        arrows["flow_out"] = True
    return arrows
