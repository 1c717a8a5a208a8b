"""A trace in the Trace Event Format, which Perfetto and Chrome open. Pure.

A process for each rank, sorted by its place in the layout, and in it threads for its steps, its
phases, its passes and its own work, and one for each group that it waits in. A collective says
which rank began it last and how long this one had waited for that.

Source: "Trace Event Format", Google, the description of `chrome://tracing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outlast.layout import Layout
from outlast.trace.ranks import (
    Span,
    TracedOperation,
    TracedRank,
    TracedSpan,
    known_since_ns,
    last_to_begin,
    meeting_of,
    own_work,
)

# Shorter gaps between operations are not own work, but what noting them takes.
LEAST_WORK_NS = 20_000
_THREADS = ("steps", "phases", "passes", "own work")
_STEPS, _PHASES, _PASSES, _WORK = range(len(_THREADS))
_NOT_LEFT = " (not left)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to the whole job."""

    name: str
    at_ns: int
    facts: Mapping[str, str]


def events(
    ranks: Sequence[TracedRank], layout: Layout, marks: Sequence[Mark] = ()
) -> Iterator[dict[str, Any]]:
    """Every event of the trace; times are in microseconds since the first."""
    begun = [
        span.start_ns for rank in ranks for span in (*rank.operations, *rank.steps, *rank.spans)
    ]
    zero_ns = min(begun, default=0)
    last = last_to_begin(ranks, layout)
    for place, rank in enumerate(sorted(ranks, key=_place)):
        threads = [*dict.fromkeys(each.group for each in rank.operations)]
        yield from _names(rank, place, threads)
        for step in rank.steps:
            yield _span(rank, _STEPS, step, zero_ns)
        for spent in rank.spans:
            yield _spent(rank, spent, zero_ns)
        for work in own_work(rank, LEAST_WORK_NS):
            yield _span(rank, _WORK, work, zero_ns)
        for operation in rank.operations:
            facts: dict[str, Any] = {"sequence": operation.sequence}
            if operation.detail >= 0:
                facts["detail"] = operation.detail
            meeting = meeting_of(rank, operation, layout)
            if meeting is not None:
                begun_ns, by = last[meeting]
                facts["last to begin"] = f"rank {by}"
                facts["waited for it (us)"] = max(0, begun_ns - operation.start_ns) / 1000
            thread = len(_THREADS) + threads.index(operation.group)
            named = _span(rank, thread, operation, zero_ns)
            if not operation.is_over:
                named["name"] += _NOT_LEFT
            yield {**named, "args": facts}
    for mark in marks:
        yield {
            "ph": "i",
            "s": "g",
            "name": mark.name,
            "ts": (mark.at_ns - zero_ns) / 1000,
            "pid": ranks[0].rank if ranks else 0,
            "tid": _STEPS,
            "args": dict(mark.facts),
        }


def cut(ranks: Sequence[TracedRank], first: int, last: int) -> list[TracedRank]:
    """Only what lies within these steps, by the times of each rank's own."""
    return [_cut(rank, range(first, last + 1)) for rank in ranks]


def _cut(rank: TracedRank, wanted: range) -> TracedRank:
    steps = tuple(each for each in rank.steps if each.step in wanted)
    start_ns = min((step.start_ns for step in steps), default=0)
    end_ns = max((step.end_ns for step in steps), default=0)
    operations: tuple[TracedOperation, ...] = tuple(
        each for each in rank.operations if start_ns <= each.start_ns and each.end_ns <= end_ns
    )
    # What lies before a part is known all the same.
    known_ns = known_since_ns(rank)
    spans = tuple(each for each in rank.spans if start_ns <= each.start_ns < end_ns)
    return replace(rank, operations=operations, steps=steps, spans=spans, known_ns=known_ns)


def _place(rank: TracedRank) -> tuple[int, int, int, int]:
    at = rank.at
    return (rank.rank, 0, 0, 0) if at is None else (at.pp, at.dp, at.tp, rank.rank)


def _names(rank: TracedRank, place: int, groups: Sequence[str]) -> Iterator[dict[str, Any]]:
    at = rank.at
    where = "" if at is None else f" (pp {at.pp}, dp {at.dp}, tp {at.tp})"
    yield _fact(rank, 0, "process_name", name=f"rank {rank.rank}{where} on {rank.node}")
    yield _fact(rank, 0, "process_sort_index", sort_index=place)
    for thread, name in enumerate((*_THREADS, *groups)):
        yield _fact(rank, thread, "thread_name", name=name)
        yield _fact(rank, thread, "thread_sort_index", sort_index=thread)


def _fact(rank: TracedRank, thread: int, kind: str, **facts: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank.rank, "tid": thread, "name": kind, "args": facts}


def _spent(rank: TracedRank, spent: TracedSpan, zero_ns: int) -> dict[str, Any]:
    thread = _PASSES if spent.is_pass else _PHASES
    named = _span(rank, thread, spent, zero_ns)
    facts: dict[str, Any] = {"waited (us)": spent.waited_ns / 1000}
    if spent.is_pass:
        facts |= {"micro-batch": spent.micro_batch, "chunk": spent.chunk}
    if not spent.is_over:
        named["name"] += _NOT_LEFT
    return {**named, "args": facts}


def _span(rank: TracedRank, thread: int, span: Span, zero_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank.rank,
        "tid": thread,
        "name": span.name,
        "ts": (span.start_ns - zero_ns) / 1000,
        "dur": max(0, span.end_ns - span.start_ns) / 1000,
    }
