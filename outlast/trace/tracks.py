"""What a trace shows, whatever its format: tracks of ranks, and what is on them. Pure.

Each rank has tracks for its steps, its phases, its passes and its own work, and one for each group
that it waits in. A collective says which rank began it last and how long this one had waited for
that. Flows join what belongs together on several tracks: the parts of one collective, and the
passes of one micro-batch on its way through the stages, in the order in which they began.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.layout import Layout
from outlast.trace.ranks import (
    Span,
    TracedRank,
    TracedSpan,
    last_to_begin,
    meeting_of,
    own_work,
    step_at,
)

# Shorter gaps between operations are not own work, but what noting them takes.
LEAST_WORK_NS = 20_000
_NOT_LEFT = " (not left)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to the whole job."""

    name: str
    at_ns: int
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Slices of several tracks that belong together."""

    number: int
    """From 1; the same for all of them."""
    is_first: bool
    is_last: bool
    """Whether this slice began before, or after, all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Span):
    """A span on a track."""

    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    flow: Flow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Slices in the order of their beginnings: one lies within another, or behind it."""

    name: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTracks:
    """A rank's, in the order in which they are shown."""

    rank: int
    name: str
    place: int
    """Among the ranks."""
    tracks: tuple[Track, ...]


def rank_tracks(ranks: Sequence[TracedRank], layout: Layout) -> Iterator[RankTracks]:
    """Of each rank, in the order of the layout: stages, then replicas, then tensor ranks."""
    last = last_to_begin(ranks, layout)
    flows = _Flows(ranks, layout)
    for place, rank in enumerate(sorted(ranks, key=_place)):
        named = {
            "steps": [Slice(name=s.name, start_ns=s.start_ns, end_ns=s.end_ns) for s in rank.steps],
            "phases": [_spent(each) for each in rank.spans if not each.is_pass],
            "passes": [
                _spent(each, flows.of(_passage(rank, each), each, rank))
                for each in rank.spans
                if each.is_pass
            ],
            "own work": [
                Slice(name=each.name, start_ns=each.start_ns, end_ns=each.end_ns)
                for each in own_work(rank, LEAST_WORK_NS)
            ],
        }
        for operation in rank.operations:
            facts: dict[str, int | float | str] = {"sequence": operation.sequence}
            if operation.detail >= 0:
                facts["detail"] = operation.detail
            meeting = meeting_of(rank, operation, layout)
            if meeting is not None:
                begun_ns, by = last[meeting]
                facts["last to begin"] = f"rank {by}"
                facts["waited for it (us)"] = max(0, begun_ns - operation.start_ns) / 1000
            named.setdefault(operation.group, []).append(
                Slice(
                    name=operation.name + ("" if operation.is_over else _NOT_LEFT),
                    start_ns=operation.start_ns,
                    end_ns=operation.end_ns,
                    facts=facts,
                    flow=flows.of(meeting, operation, rank),
                )
            )
        at = rank.at
        where = "" if at is None else f" (pp {at.pp}, dp {at.dp}, tp {at.tp})"
        yield RankTracks(
            rank=rank.rank,
            name=f"rank {rank.rank}{where} on {rank.node}",
            place=place,
            tracks=tuple(track for name, slices in named.items() for track in _laid(name, slices)),
        )


def first_ns(ranks: Iterable[TracedRank]) -> int:
    """When the first thing that a trace shows began; 0 where there is none."""
    begun = (
        span.start_ns for rank in ranks for span in (*rank.operations, *rank.steps, *rank.spans)
    )
    return min(begun, default=0)


def _place(rank: TracedRank) -> tuple[int, int, int, int]:
    at = rank.at
    return (rank.rank, 0, 0, 0) if at is None else (at.pp, at.dp, at.tp, rank.rank)


def _spent(spent: TracedSpan, flow: Flow | None = None) -> Slice:
    facts: dict[str, int | float | str] = {"waited (us)": spent.waited_ns / 1000}
    if spent.is_pass:
        facts |= {"micro-batch": spent.micro_batch, "chunk": spent.chunk}
    return Slice(
        name=spent.name + ("" if spent.is_over else _NOT_LEFT),
        start_ns=spent.start_ns,
        end_ns=max(spent.start_ns, spent.end_ns),
        facts=facts,
        flow=flow,
    )


@dataclass(slots=True)
class _Lane:
    slices: list[Slice] = field(default_factory=list)
    # Of those that the last one lies in, and its own; the innermost is the last.
    ends_ns: list[int] = field(default_factory=list)

    def has_room(self, found: Slice) -> bool:
        """Whether it lies within or behind all that is here; it begins after them."""
        while self.ends_ns and self.ends_ns[-1] <= found.start_ns:
            self.ends_ns.pop()
        return not self.ends_ns or found.end_ns <= self.ends_ns[-1]

    def add(self, found: Slice) -> None:
        self.slices.append(found)
        self.ends_ns.append(found.end_ns)


def _laid(name: str, slices: Sequence[Slice]) -> Iterator[Track]:
    """A track, and further ones for what overlaps with what is on those before."""
    lanes = [_Lane()]
    for each in sorted(slices, key=lambda one: (one.start_ns, -one.end_ns)):
        lane = next((one for one in lanes if one.has_room(each)), None)
        if lane is None:
            lane = _Lane()
            lanes.append(lane)
        lane.add(each)
    for number, lane in enumerate(lanes, 1):
        yield Track(name=name if number == 1 else f"{name} ({number})", slices=tuple(lane.slices))


class _Flows:
    """Which slices of several tracks belong together."""

    def __init__(self, ranks: Sequence[TracedRank], layout: Layout) -> None:
        ends: dict[Hashable, tuple[tuple[int, int], tuple[int, int]]] = {}
        for rank in ranks:
            for key, span in _joined(rank, layout):
                begun = (span.start_ns, rank.rank)
                first, last = ends.get(key, (begun, begun))
                ends[key] = (min(first, begun), max(last, begun))
        several = ((key, each) for key, each in ends.items() if each[0] != each[1])
        self._ends = {key: (number, *each) for number, (key, each) in enumerate(several, 1)}

    def of(self, key: Hashable | None, span: Span, rank: TracedRank) -> Flow | None:
        """The flow that a span belongs to; None where nothing else does."""
        if key is None or key not in self._ends:
            return None
        number, first, last = self._ends[key]
        begun = (span.start_ns, rank.rank)
        return Flow(number=number, is_first=begun == first, is_last=begun == last)


def _joined(rank: TracedRank, layout: Layout) -> Iterator[tuple[Hashable, Span]]:
    for operation in rank.operations:
        meeting = meeting_of(rank, operation, layout)
        if meeting is not None:
            yield meeting, operation
    for each in rank.spans:
        passage = _passage(rank, each)
        if passage is not None:
            yield passage, each


def _passage(rank: TracedRank, spent: TracedSpan) -> Hashable | None:
    """A micro-batch's way through the stages that this pass is part of."""
    if not spent.is_pass or rank.at is None:
        return None
    step = step_at(rank, spent.start_ns)
    return None if step is None else ("passes", step, rank.at.dp, rank.at.tp, spent.micro_batch)
