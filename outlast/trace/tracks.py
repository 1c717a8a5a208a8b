"""What a trace shows, whatever its format: tracks of ranks, and what is on them. Pure.

Each rank has tracks for its steps, its phases, its passes and its own work, one for each group that
it waits in, and one for what was under way in that group while it did something else. A collective
says which rank began it last and how long this one had waited for that; a receive has its transfer
within it. Flows join what belongs together on several tracks: the parts of one collective, a
message's departure and its transfer, and the passes of one micro-batch on its way through the
stages, in the order in which they began.

Ranks are looked at twice, the first time for an `Overview` of them, and one at a time: what is kept
of each is small, so that they need not all fit into memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outlast.layout import Layout
from outlast.trace.messages import RECEIVE, SEND, Message, Messages, peer_of
from outlast.trace.ranks import (
    LastToBegin,
    Meeting,
    Span,
    TracedOperation,
    TracedRank,
    TracedSpan,
    meeting_of,
    own_work,
    step_at,
)

# Shorter gaps between operations are not own work, but what noting them takes.
LEAST_WORK_NS = 20_000
_NOT_LEFT = " (not left)"
UNDER_WAY = " under way"
# Flows of messages have numbers of their own, behind all others.
_FIRST_MESSAGE = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to the whole job."""

    name: str
    at_ns: int
    facts: Mapping[str, str]
    step: int | None = None
    """Of a checkpoint that was committed."""


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


class Overview:
    """What a trace has to know of all ranks before it shows the first."""

    def __init__(self, ranks: Iterable[TracedRank], layout: Layout) -> None:
        self.layout = layout
        self.steps: set[int] = set()
        # By step, how many ranks had gone on from their copy of it, and when the last of them had.
        self.copied: dict[int, tuple[int, int]] = {}
        self.last = LastToBegin(layout)
        self.messages = Messages(layout)
        self._flows = _Flows()
        self._first_ns: int | None = None
        self._last_ns = 0
        self._places: list[tuple[tuple[int, int, int, int], int]] = []
        for index, rank in enumerate(ranks):
            self._places.append((_place(rank), index))
            self._add(rank)
        self._places.sort()

    @property
    def first_ns(self) -> int:
        """When the first thing that is shown began; 0 where there is none."""
        return self._first_ns or 0

    def shows(self, mark: Mark) -> bool:
        """Whether a mark belongs to what is shown: what came before it does not, nor what storage
        had long after it of other steps."""
        if mark.at_ns < self.first_ns:
            return False
        return mark.step is None or mark.step in self.steps or mark.at_ns <= self._last_ns

    def order(self) -> list[int]:
        """Indexes of the ranks in the order of the layout."""
        return [index for _, index in self._places]

    def flow(self, key: Hashable | None, span: Span, rank: TracedRank) -> Flow | None:
        """The flow that a span belongs to; None where nothing else does."""
        return self._flows.of(key, span, rank)

    def _add(self, rank: TracedRank) -> None:
        shown = (*rank.operations, *rank.steps, *rank.spans)
        starts = [span.start_ns for span in shown]
        starts += [] if self._first_ns is None else [self._first_ns]
        self._last_ns = max(self._last_ns, *(span.end_ns for span in shown), 0)
        self._first_ns = min(starts, default=None)
        self.steps |= {step.step for step in rank.steps}
        for step, at_ns in _copied(rank):
            number, latest_ns = self.copied.get(step, (0, 0))
            self.copied[step] = (number + 1, max(latest_ns, at_ns))
        self.last.add(rank)
        self.messages.add(rank)
        self._flows.add(rank, self.layout)


def rank_tracks(
    ranks: Sequence[TracedRank], layout: Layout, overview: Overview | None = None
) -> Iterator[RankTracks]:
    """Of each rank, in the order of the layout: stages, then replicas, then tensor ranks.

    `overview` is that of these ranks; it is made where there is none yet.
    """
    known = overview or Overview(ranks, layout)
    for place, index in enumerate(known.order()):
        rank = ranks[index]
        named = {
            "steps": [Slice(name=s.name, start_ns=s.start_ns, end_ns=s.end_ns) for s in rank.steps],
            "phases": [_spent(each) for each in rank.spans if not each.is_pass],
            "passes": [
                _spent(each, known.flow(_passage(rank, each), each, rank))
                for each in rank.spans
                if each.is_pass
            ],
            "own work": [
                Slice(name=each.name, start_ns=each.start_ns, end_ns=each.end_ns)
                for each in own_work(rank, LEAST_WORK_NS)
            ],
        }
        for operation in rank.operations:
            for track, found in _of_operation(rank, operation, known):
                named.setdefault(track, []).append(found)
        at = rank.at
        where = "" if at is None else f" (pp {at.pp}, dp {at.dp}, tp {at.tp})"
        yield RankTracks(
            rank=rank.rank,
            name=f"rank {rank.rank}{where} on {rank.node}",
            place=place,
            tracks=tuple(track for name, slices in named.items() for track in _laid(name, slices)),
        )


def copy_marks(overview: Overview) -> list[Mark]:
    """When all ranks that are known had gone on from their copy of a step to host memory.

    One that is made while training goes on may end later.
    """
    return [
        Mark(name=f"checkpoint of step {step} taken", at_ns=at_ns, facts={"ranks": str(number)})
        for step, (number, at_ns) in sorted(overview.copied.items())
    ]


def _copied(rank: TracedRank) -> Iterator[tuple[int, int]]:
    """Steps that the rank has copied to host memory, and when it went on."""
    ends = [step.end_ns for step in rank.steps]
    for span in rank.spans:
        index = bisect_right(ends, span.start_ns) - 1
        if span.name == "checkpoint" and not span.is_pass and span.is_over and index >= 0:
            yield rank.steps[index].step, span.end_ns


def _of_operation(
    rank: TracedRank, operation: TracedOperation, known: Overview
) -> Iterator[tuple[str, Slice]]:
    """Slices of one operation, each with its track."""
    meeting = meeting_of(rank, operation, known.layout)
    message = known.messages.of(rank, operation)
    is_under_way = 0 < operation.departed_ns < operation.start_ns
    flow = known.flow(meeting, operation, rank)
    if message is not None and operation.name == SEND and not is_under_way:
        flow = _message_flow(message, is_first=True)
    yield (
        operation.group,
        Slice(
            name=operation.name + ("" if operation.is_over else _NOT_LEFT),
            start_ns=operation.start_ns,
            end_ns=operation.end_ns,
            facts=_facts(rank, operation, meeting, message, known),
            flow=flow,
        ),
    )
    if message is not None and operation.name == RECEIVE:
        # Behind the departure, however coarse the clocks are: an arrow goes forward in time.
        start_ns = max(operation.start_ns, message.departed_ns + 1)
        if start_ns <= operation.end_ns:
            arrow = _message_flow(message, is_first=False)
            end_ns = operation.end_ns
            found = Slice(name="transfer", start_ns=start_ns, end_ns=end_ns, flow=arrow)
            yield operation.group, found
    if is_under_way:
        yield operation.group + UNDER_WAY, _under_way(operation, message)


def _facts(
    rank: TracedRank,
    operation: TracedOperation,
    meeting: Meeting | None,
    message: Message | None,
    known: Overview,
) -> dict[str, int | float | str]:
    facts: dict[str, int | float | str] = {"sequence": operation.sequence}
    if operation.detail >= 0:
        facts["detail"] = operation.detail
    peer = peer_of(rank, operation, known.layout)
    if peer is not None:
        facts["peer"] = f"rank {peer}"
    waited_ns = None
    if meeting is not None:
        begun_ns, by = known.last.of(meeting)
        facts["last to begin"] = f"rank {by}"
        waited_ns = begun_ns - operation.start_ns
    elif message is not None and operation.name == RECEIVE:
        waited_ns = min(message.departed_ns, operation.end_ns) - operation.start_ns
    if waited_ns is not None:
        facts["waited for it (us)"] = max(0, waited_ns) / 1000
    return facts


def _under_way(operation: TracedOperation, message: Message | None) -> Slice:
    """Its messages had left, and the rank did something else."""
    end_ns = operation.start_ns
    if message is not None:
        end_ns = max(operation.departed_ns, min(end_ns, message.arrived_ns))
    return Slice(
        name=operation.name,
        start_ns=operation.departed_ns,
        end_ns=end_ns,
        facts={"sequence": operation.sequence},
        flow=None if message is None else _message_flow(message, is_first=True),
    )


def _message_flow(message: Message, *, is_first: bool) -> Flow:
    return Flow(number=_FIRST_MESSAGE + message.index, is_first=is_first, is_last=not is_first)


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


@dataclass(slots=True)
class _Ends:
    """When the first and the last slice of a flow began, each with its rank."""

    number: int
    first: tuple[int, int]
    last: tuple[int, int]


class _Flows:
    """Which slices of several tracks belong together."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, _Ends] = {}

    def add(self, rank: TracedRank, layout: Layout) -> None:
        """One more rank."""
        for key, span in _joined(rank, layout):
            begun = (span.start_ns, rank.rank)
            ends = self._ends.get(key)
            if ends is None:
                self._ends[key] = _Ends(len(self._ends) + 1, begun, begun)
            else:
                ends.first, ends.last = min(ends.first, begun), max(ends.last, begun)

    def of(self, key: Hashable | None, span: Span, rank: TracedRank) -> Flow | None:
        """The flow that a span belongs to; None where nothing else does."""
        ends = None if key is None else self._ends.get(key)
        if ends is None or ends.first == ends.last:
            return None
        begun = (span.start_ns, rank.rank)
        return Flow(number=ends.number, is_first=begun == ends.first, is_last=begun == ends.last)


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
