"""What ranks did and when, as a trace is made of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.layout import Coordinate, Layout

if TYPE_CHECKING:
    from outlast.v1.ranks_pb2 import ReadTimesResponse

# All members end them at nearly the same moment, and wait in them for the last one to begin.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something with a beginning and an end, in nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperation(Span):
    """An operation that may have waited for other ranks."""

    group: str
    sequence: int
    detail: int
    is_over: bool = True
    """Whether it is known to have ended; else its end is the last moment that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep(Span):
    """A training step that a rank has completed."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """A rank with its last operations and steps, each in the order of their ends."""

    rank: int
    node: str
    at: Coordinate | None
    """None for a rank that is not in the job's present layout."""
    operations: tuple[TracedOperation, ...]
    steps: tuple[TracedStep, ...]
    known_ns: int | None = None
    """Since when all of its operations are there; None: since the first of them."""


@dataclass(frozen=True, slots=True, order=True)
class Meeting:
    """One collective operation of one group."""

    group: str
    members: tuple[int, ...]
    sequence: int


def traced_ranks(found: Iterable[ReadTimesResponse], layout: Layout) -> list[TracedRank]:
    """Times of ranks as the controller sends them, in the order of the ranks."""
    found = sorted(found, key=lambda each: each.rank)
    moments = [
        moment
        for each in found
        for span in each.times.operations
        for moment in (span.start_ns, span.end_ns)
    ]
    latest_ns = max(
        [*moments, *(span.end_ns for each in found for span in each.times.steps)], default=0
    )
    return [_traced_rank(each, layout, latest_ns) for each in found]


def _traced_rank(found: ReadTimesResponse, layout: Layout, latest_ns: int) -> TracedRank:
    is_placed = found.rank < layout.world_size
    return TracedRank(
        rank=found.rank,
        node=found.node,
        at=layout.coordinate(found.rank) if is_placed else None,
        operations=tuple(
            TracedOperation(
                name=each.op,
                start_ns=each.start_ns,
                end_ns=each.end_ns or latest_ns,
                group=each.group,
                sequence=each.sequence,
                detail=each.detail,
                is_over=each.end_ns > 0,
            )
            for each in found.times.operations
        ),
        steps=tuple(
            TracedStep(
                name=f"step {each.step}",
                step=each.step,
                start_ns=each.start_ns,
                end_ns=each.end_ns,
            )
            for each in found.times.steps
        ),
    )


def meeting_of(rank: TracedRank, operation: TracedOperation, layout: Layout) -> Meeting | None:
    """Which collective a rank's operation was its part of; None where that cannot be told."""
    if operation.name not in COLLECTIVES or rank.at is None:
        return None
    if operation.group == "world":
        members: tuple[int, ...] = ()
    else:
        try:
            members = layout.group_of(operation.group, rank.rank)
        except ValueError:
            return None
    return Meeting(operation.group, members, operation.sequence)


def own_work(rank: TracedRank, least_ns: int) -> list[Span]:
    """Where a rank was in a step and in no operation, for at least so long."""
    operations = sorted(rank.operations, key=lambda each: each.start_ns)
    # Before the first that is still known there were others.
    known_ns = rank.known_ns
    if known_ns is None:
        known_ns = operations[0].start_ns if operations else 0
    found, index = [], 0
    for step in rank.steps:
        at_ns = max(step.start_ns, known_ns)
        while index < len(operations) and operations[index].start_ns < step.end_ns:
            operation = operations[index]
            index += 1
            if operation.start_ns - at_ns >= least_ns:
                found.append(Span(name="own work", start_ns=at_ns, end_ns=operation.start_ns))
            at_ns = max(at_ns, operation.end_ns)
        if step.end_ns - at_ns >= least_ns:
            found.append(Span(name="own work", start_ns=at_ns, end_ns=step.end_ns))
    return found


def last_to_begin(ranks: Iterable[TracedRank], layout: Layout) -> dict[Meeting, tuple[int, int]]:
    """For each collective the moment at which its last member began, and that rank."""
    last: dict[Meeting, tuple[int, int]] = {}
    for rank in ranks:
        for operation in rank.operations:
            meeting = meeting_of(rank, operation, layout)
            if meeting is not None:
                begun = (operation.start_ns, rank.rank)
                last[meeting] = max(last.get(meeting, begun), begun)
    return last
