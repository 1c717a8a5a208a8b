"""One step over ranks: what each did when, and whom it waited for. Pure.

A rank that stands still in an operation waits for one of three things: a rank of another stage,
whose turn in the pipeline comes first (the bubble); another rank that is late; or the transfer
itself. The last two are exposed communication. What was under way while the rank computed is
hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outlast.layout import Layout
from outlast.trace.clocks import ahead_ns, aligned
from outlast.trace.messages import RECEIVE, Messages, peer_of
from outlast.trace.ranks import (
    LastToBegin,
    TracedOperation,
    TracedRank,
    cut,
    known_since_ns,
    meeting_of,
    named_work,
)
from outlast.trace.tracks import LEAST_WORK_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that a rank did in the step; times are in seconds since the step began anywhere."""

    name: str
    begun_s: float
    ended_s: float
    group: str = ""
    """The group of an operation; "" for work of the rank's own."""
    sequence: int = 0
    detail: int = -1
    """As of `outlast.blackbox.OpRecord`; of work the micro-batch."""
    chunk: int = 0
    """Of a pass: which of the rank's parts of the model (virtual stages)."""
    is_over: bool = True
    last: int | None = None
    """The rank that this one had to wait for: of a collective the one that began it last, of a
    receive its sender."""
    waited_s: float = 0.0
    """For how long this rank waited for that one."""
    bubble_s: float = 0.0
    """From the beginning on: for another stage of the pipeline, whose turn came first."""
    peer: int | None = None
    """Of a send or receive the other rank."""
    message: int | None = None
    """Of a send or receive: its message's number, which both of its ends have in a step."""
    departed_s: float | None = None
    """When its message left, where that was before `begun_s`."""
    hidden_s: float = 0.0
    """For how long from then on it was under way at most, while this rank did something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What one rank did, in the order of the beginnings."""

    rank: int
    node: str
    pp: int | None
    bars: tuple[Bar, ...]
    step_s: float = 0.0
    """What the step took this rank; the rest are parts of it."""
    bubble_s: float = 0.0
    """It stood still for another stage of the pipeline, whose turn came first."""
    exposed_s: float = 0.0
    """It stood still in operations otherwise: for late ranks, and for transfers."""
    hidden_s: float = 0.0
    """Messages were under way while it did not stand still; at most, as nobody says when one
    arrived that is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of some ranks."""

    step: int
    begun_ns: int
    """Since the epoch, by the clock of the first rank's node."""
    length_s: float
    tracks: tuple[Track, ...]
    apart_s: float
    """How far apart the clocks of the nodes were, which has been corrected."""


def known_steps(ranks: Sequence[TracedRank]) -> list[int]:
    """Steps of which some rank still has all operations, oldest first."""
    found: set[int] = set()
    for rank in ranks:
        known_ns = known_since_ns(rank)
        found |= {each.step for each in rank.steps if known_ns is None or each.start_ns >= known_ns}
    return sorted(found)


def timeline(ranks: Sequence[TracedRank], layout: Layout, step: int) -> Timeline:
    """What these ranks did in a step; those that have not done it have no track."""
    ahead = ahead_ns(ranks, layout)
    shown = [rank for rank in cut(aligned(ranks, ahead), step, step) if rank.steps]
    found = _Step(shown, layout)
    return Timeline(
        step=step,
        begun_ns=found.begun_ns,
        length_s=(max((rank.steps[-1].end_ns for rank in shown), default=0) - found.begun_ns) / 1e9,
        tracks=tuple(found.track(rank) for rank in shown),
        apart_s=max(map(abs, ahead.values()), default=0) / 1e9,
    )


@dataclass(frozen=True, slots=True)
class _Wait:
    """What an operation of a rank was spent on; moments are in nanoseconds since the epoch."""

    last: int | None = None
    waited_ns: int = 0
    bubble_ns: int = 0
    departed_ns: int = 0
    hidden_until_ns: int = 0


class _Step:
    """One step of the ranks that are shown."""

    def __init__(self, ranks: Sequence[TracedRank], layout: Layout) -> None:
        self.begun_ns = min((rank.steps[0].start_ns for rank in ranks), default=0)
        self._layout = layout
        self._last = LastToBegin(layout)
        self._messages = Messages(layout)
        for rank in ranks:
            self._last.add(rank)
            self._messages.add(rank)
        self._stages = {rank.rank: rank.at.pp for rank in ranks if rank.at is not None}
        # When the last stage of each pipeline had done its part.
        self._computed_ns: dict[tuple[int, int], int] = {}
        for rank in ranks:
            if rank.at is not None:
                ended_ns = max((each.end_ns for each in rank.spans if each.is_pass), default=0)
                pipeline = (rank.at.dp, rank.at.tp)
                self._computed_ns[pipeline] = max(self._computed_ns.get(pipeline, 0), ended_ns)

    def track(self, rank: TracedRank) -> Track:
        """What one rank did."""
        waits = [(each, self._wait(rank, each)) for each in rank.operations]
        bars = [*self._work(rank), *(self._bar(rank, each, wait) for each, wait in waits)]
        standing = _merged((each.start_ns, each.end_ns) for each, _ in waits)
        bubbles = _merged((each.start_ns, each.start_ns + wait.bubble_ns) for each, wait in waits)
        begun_ns, ended_ns = rank.steps[0].start_ns, rank.steps[-1].end_ns
        under_way = _merged(
            (max(wait.departed_ns, begun_ns), wait.hidden_until_ns) for _, wait in waits
        )
        bubble_ns = _length(bubbles)
        return Track(
            rank=rank.rank,
            node=rank.node,
            pp=None if rank.at is None else rank.at.pp,
            bars=tuple(sorted(bars, key=lambda bar: bar.begun_s)),
            step_s=(ended_ns - begun_ns) / 1e9,
            bubble_s=bubble_ns / 1e9,
            exposed_s=(_length(standing) - bubble_ns) / 1e9,
            # Behind one wait another message is no more hidden than the one that is waited for.
            hidden_s=(_length(_merged([*standing, *under_way])) - _length(standing)) / 1e9,
        )

    def _wait(self, rank: TracedRank, operation: TracedOperation) -> _Wait:
        meeting = meeting_of(rank, operation, self._layout)
        if meeting is not None:
            begun_ns, last = self._last.of(meeting)
            waited_ns = max(0, begun_ns - operation.start_ns)
            return _Wait(
                last=last,
                waited_ns=waited_ns,
                bubble_ns=self._bubble_ns(rank, operation, last, waited_ns),
                departed_ns=operation.begun_ns,
                hidden_until_ns=operation.start_ns,
            )
        message = self._messages.of(rank, operation)
        if message is None:
            # Nothing is known of its other end. What one receives is mostly not there yet.
            is_bubble = operation.name == RECEIVE and operation.group == "pp"
            return _Wait(
                bubble_ns=operation.end_ns - operation.start_ns if is_bubble else 0,
                departed_ns=operation.begun_ns,
                hidden_until_ns=operation.start_ns,
            )
        if rank.rank == message.sender:
            return _Wait(
                departed_ns=message.departed_ns,
                hidden_until_ns=min(operation.start_ns, message.arrived_ns),
            )
        left_ns = min(message.departed_ns, operation.end_ns)
        waited_ns = max(0, left_ns - operation.start_ns)
        return _Wait(
            last=message.sender,
            waited_ns=waited_ns,
            bubble_ns=waited_ns,
            departed_ns=message.departed_ns,
            hidden_until_ns=operation.start_ns,
        )

    def _bubble_ns(
        self, rank: TracedRank, operation: TracedOperation, last: int, waited_ns: int
    ) -> int:
        """How much of the wait for a rank of another stage the pipeline was still computing."""
        if rank.at is None or self._stages[last] == rank.at.pp:
            return 0
        computed_ns = self._computed_ns[rank.at.dp, rank.at.tp]
        return max(0, min(waited_ns, computed_ns - operation.start_ns))

    def _bar(self, rank: TracedRank, each: TracedOperation, wait: _Wait) -> Bar:
        hidden_ns = max(0, wait.hidden_until_ns - wait.departed_ns)
        return Bar(
            name=each.name,
            begun_s=self._since_s(each.start_ns),
            ended_s=self._since_s(each.end_ns),
            group=each.group,
            sequence=each.sequence,
            detail=each.detail,
            is_over=each.is_over,
            last=wait.last,
            waited_s=wait.waited_ns / 1e9,
            bubble_s=wait.bubble_ns / 1e9,
            peer=peer_of(rank, each, self._layout),
            message=each.message,
            departed_s=self._since_s(wait.departed_ns) if hidden_ns else None,
            hidden_s=hidden_ns / 1e9,
        )

    def _work(self, rank: TracedRank) -> Iterator[Bar]:
        for each in named_work(rank, LEAST_WORK_NS):
            yield Bar(
                name=each.name,
                begun_s=self._since_s(each.start_ns),
                ended_s=self._since_s(each.end_ns),
                detail=each.micro_batch,
                chunk=each.chunk,
            )

    def _since_s(self, at_ns: int) -> float:
        return (at_ns - self.begun_ns) / 1e9


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time in spans that do not overlap, in order; those that end before they begin are
    none."""
    merged: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(spans):
        if end_ns <= start_ns:
            continue
        if merged and start_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_ns))
        else:
            merged.append((start_ns, end_ns))
    return merged


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end_ns - start_ns for start_ns, end_ns in spans)
