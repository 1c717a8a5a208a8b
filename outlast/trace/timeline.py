"""One step over ranks: what each did when, and whom it waited for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlast.layout import Layout
from outlast.trace.clocks import ahead_ns, aligned
from outlast.trace.ranks import (
    TracedOperation,
    TracedRank,
    cut,
    known_since_ns,
    last_to_begin,
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
    """Of a collective the rank that began it last, for which the others had to wait."""
    waited_s: float = 0.0
    """For how long this rank waited for that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What one rank did, in the order of the beginnings."""

    rank: int
    node: str
    pp: int | None
    bars: tuple[Bar, ...]


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
    begun_ns = min((rank.steps[0].start_ns for rank in shown), default=0)
    ended_ns = max((rank.steps[-1].end_ns for rank in shown), default=0)
    last = last_to_begin(shown, layout)

    def bar_of(rank: TracedRank, each: TracedOperation) -> Bar:
        meeting = meeting_of(rank, each, layout)
        by_ns, by = (each.start_ns, None) if meeting is None else last[meeting]
        return Bar(
            name=each.name,
            begun_s=(each.start_ns - begun_ns) / 1e9,
            ended_s=(each.end_ns - begun_ns) / 1e9,
            group=each.group,
            sequence=each.sequence,
            detail=each.detail,
            is_over=each.is_over,
            last=by,
            waited_s=max(0, by_ns - each.start_ns) / 1e9,
        )

    def track_of(rank: TracedRank) -> Track:
        work = [
            Bar(
                name=each.name,
                begun_s=(each.start_ns - begun_ns) / 1e9,
                ended_s=(each.end_ns - begun_ns) / 1e9,
                detail=each.micro_batch,
                chunk=each.chunk,
            )
            for each in named_work(rank, LEAST_WORK_NS)
        ]
        bars = sorted(
            [*work, *(bar_of(rank, each) for each in rank.operations)],
            key=lambda bar: bar.begun_s,
        )
        pp = None if rank.at is None else rank.at.pp
        return Track(rank=rank.rank, node=rank.node, pp=pp, bars=tuple(bars))

    return Timeline(
        step=step,
        begun_ns=begun_ns,
        length_s=(ended_ns - begun_ns) / 1e9,
        tracks=tuple(track_of(rank) for rank in shown),
        apart_s=max(map(abs, ahead.values()), default=0) / 1e9,
    )
