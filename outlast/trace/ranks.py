"""What ranks did and when, as a trace is made of it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.layout import Coordinate, Layout

if TYPE_CHECKING:
    from outlast.v1.ranks_pb2 import ReadTimesResponse

OWN_WORK = "own work"
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
    departed_ns: int = 0
    """When this rank's messages left, where that was before the start; else 0."""
    peer: int | None = None
    """Of a send or receive: the other one's place in the group."""
    message: int | None = None
    """Of a send or receive: a number that no other message to its receiver has in a step."""

    @property
    def begun_ns(self) -> int:
        """When this rank had done its part, and the others had to wait no longer for it."""
        return self.departed_ns or self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSpan(Span):
    """A phase of a rank, or a pass within one."""

    is_pass: bool
    chunk: int
    micro_batch: int
    waited_ns: int
    """In operations, which may wait for other ranks."""
    is_over: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep(Span):
    """A training step that a rank has completed."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """A rank with its last operations, steps and spans, each in the order of their ends."""

    rank: int
    node: str
    at: Coordinate | None
    """None for a rank that is not in the job's present layout."""
    operations: tuple[TracedOperation, ...]
    steps: tuple[TracedStep, ...]
    spans: tuple[TracedSpan, ...] = ()
    known_ns: int | None = None
    """Since when its operations are there, or known not to be in these steps; None: since the first
    of them."""


@dataclass(frozen=True, slots=True, order=True)
class Meeting:
    """One collective operation of one group."""

    group: str
    first: int
    """The group's member with the lowest rank, which no other group of its kind has."""
    sequence: int


def traced_ranks(found: Iterable[ReadTimesResponse], layout: Layout) -> list[TracedRank]:
    """Times of ranks as the controller sends them, in the order of the ranks."""
    found = sorted(found, key=lambda each: each.rank)
    until_ns = max(map(latest_ns, found), default=0)
    return [traced_rank(each, layout, until_ns) for each in found]


def latest_ns(found: ReadTimesResponse) -> int:
    """The last moment that a rank knows of; 0 for none."""
    times = found.times
    moments = [moment for each in times.operations for moment in (each.start_ns, each.end_ns)]
    moments += [each.end_ns for each in times.steps]
    moments += [each.end_ns for each in times.spans]
    return max(moments, default=0)


def traced_rank(found: ReadTimesResponse, layout: Layout, until_ns: int) -> TracedRank:
    """One rank; what has not ended goes on until that moment."""
    is_placed = found.rank < layout.world_size
    return TracedRank(
        rank=found.rank,
        node=found.node,
        at=layout.coordinate(found.rank) if is_placed else None,
        operations=tuple(
            TracedOperation(
                name=each.op,
                start_ns=each.start_ns,
                end_ns=each.end_ns or until_ns,
                group=each.group,
                sequence=each.sequence,
                detail=each.detail,
                is_over=each.end_ns > 0,
                departed_ns=each.departed_ns,
                peer=each.peer if each.HasField("peer") else None,
                message=each.message if each.HasField("message") else None,
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
        spans=tuple(
            TracedSpan(
                name=each.work or each.phase,
                is_pass=bool(each.work),
                chunk=each.chunk,
                micro_batch=each.micro_batch,
                start_ns=each.start_ns,
                end_ns=each.end_ns or max(until_ns, each.start_ns),
                waited_ns=each.waited_ns,
                is_over=each.end_ns > 0,
            )
            for each in found.times.spans
        ),
        known_ns=found.times.known_since_ns or None,
    )


def meeting_of(rank: TracedRank, operation: TracedOperation, layout: Layout) -> Meeting | None:
    """Which collective a rank's operation was its part of; None where that cannot be told."""
    if operation.name not in COLLECTIVES or rank.at is None:
        return None
    first = _first_member(operation.group, rank.rank, rank.at, layout)
    return None if first is None else Meeting(operation.group, first, operation.sequence)


def _first_member(group: str, rank: int, at: Coordinate, layout: Layout) -> int | None:
    # As `Layout.group_of(group, rank)[0]`, which makes all of it: a trace has millions of them.
    match group:
        case "world":
            return 0
        case "tp":
            return rank - at.tp
        case "dp":
            return rank - at.dp * layout.tp
        case "pp" | "embedding":
            return rank % (layout.tp * layout.dp)
        case "cp":
            return rank - at.dp % layout.cp * layout.tp
        case "ep":
            return rank - at.dp % layout.ep * layout.tp
        case "expert_dp":
            return rank - (at.dp - at.dp % layout.ep) * layout.tp
        case _:
            return None


def step_at(rank: TracedRank, at_ns: int) -> int | None:
    """The step of the rank that a moment lies in; None between steps, and before those known."""
    # Also in the step that is not complete yet.
    index = bisect_right(rank.steps, at_ns, key=lambda step: step.end_ns)
    if index < len(rank.steps):
        step = rank.steps[index]
        return step.step if step.start_ns <= at_ns else None
    return rank.steps[-1].step + 1 if rank.steps else None


def known_since_ns(rank: TracedRank) -> int | None:
    """Before this moment operations may have been written over; None for a rank without any."""
    if rank.known_ns is not None:
        return rank.known_ns
    return min((each.start_ns for each in rank.operations), default=None)


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


def own_work(rank: TracedRank, least_ns: int) -> list[Span]:
    """Where a rank was in a step and in no operation, for at least so long."""
    operations = sorted(rank.operations, key=lambda each: each.start_ns)
    # Before the first that is still known there were others.
    known_ns = known_since_ns(rank) or 0
    found, index = [], 0
    for step in rank.steps:
        at_ns = max(step.start_ns, known_ns)
        while index < len(operations) and operations[index].start_ns < step.end_ns:
            operation = operations[index]
            index += 1
            if operation.start_ns - at_ns >= least_ns:
                found.append(Span(name=OWN_WORK, start_ns=at_ns, end_ns=operation.start_ns))
            at_ns = max(at_ns, operation.end_ns)
        if step.end_ns - at_ns >= least_ns:
            found.append(Span(name=OWN_WORK, start_ns=at_ns, end_ns=step.end_ns))
    return found


def named_work(rank: TracedRank, least_ns: int) -> list[TracedSpan]:
    """`own_work`, by the passes that it was spent on, or else by the phases."""
    over = sorted((each for each in rank.spans if each.is_over), key=lambda each: each.start_ns)
    passes = [each for each in over if each.is_pass]
    phases = [each for each in over if not each.is_pass]
    if not _is_one_clock(passes, phases):
        phases = []
    found = []
    for gap in own_work(rank, least_ns):
        for piece, of_pass in _cut_by(gap, passes):
            named = [(piece, of_pass)] if of_pass else _cut_by(piece, phases)
            found += [
                TracedSpan(
                    name=each.name if each else OWN_WORK,
                    is_pass=each is not None and each.is_pass,
                    chunk=each.chunk if each else 0,
                    micro_batch=each.micro_batch if each else -1,
                    start_ns=part.start_ns,
                    end_ns=part.end_ns,
                    waited_ns=0,
                )
                for part, each in named
                if part.end_ns - part.start_ns >= least_ns
            ]
    return found


def _is_one_clock(passes: Sequence[TracedSpan], phases: Sequence[TracedSpan]) -> bool:
    """Whether who computes is in the phases: a device does later what the host gives it.

    Then passes begin in the phase that they are of and end behind it.
    """
    ends = [each.end_ns for each in phases]
    for each in passes:
        index = bisect_right(ends, each.start_ns)
        if index == len(phases) or each.start_ns < phases[index].start_ns:
            continue
        if each.end_ns > ends[index] or phases[index].name != "forward_backward":
            return False
    return True


def _cut_by(gap: Span, spans: Sequence[TracedSpan]) -> list[tuple[Span, TracedSpan | None]]:
    """Parts of `gap`, in order: those within one of `spans`, and those between them."""
    parts: list[tuple[Span, TracedSpan | None]] = []
    at_ns = gap.start_ns
    for each in spans[bisect_right(spans, at_ns, key=lambda span: span.end_ns) :]:
        if each.start_ns >= gap.end_ns:
            break
        if each.start_ns > at_ns:
            parts.append((replace(gap, start_ns=at_ns, end_ns=each.start_ns), None))
        end_ns = min(each.end_ns, gap.end_ns)
        parts.append((replace(gap, start_ns=max(at_ns, each.start_ns), end_ns=end_ns), each))
        at_ns = end_ns
    if at_ns < gap.end_ns:
        parts.append((replace(gap, start_ns=at_ns), None))
    return parts


class LastToBegin:
    """Of each collective the moment at which its last member began, and that rank."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last: dict[Meeting, tuple[int, int]] = {}

    def add(self, rank: TracedRank) -> None:
        """One more rank."""
        for operation in rank.operations:
            meeting = meeting_of(rank, operation, self._layout)
            if meeting is not None:
                begun = (operation.begun_ns, rank.rank)
                self._last[meeting] = max(self._last.get(meeting, begun), begun)

    def of(self, meeting: Meeting) -> tuple[int, int]:
        """Of one that some rank that was added has a part in."""
        return self._last[meeting]
