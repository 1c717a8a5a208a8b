"""What ranks have noted of themselves, for the JSON API: a heat map, and the timeline of a step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from controller.web.gateway import Gateway, RequestError
from controller.web.routes import method
from outlast.layout import Layout
from outlast.trace.heat import Measure, Order, node_stride
from outlast.trace.heat_map import Floats, HeatMap, Row
from outlast.trace.ranks import TracedRank, traced_ranks
from outlast.trace.timeline import Bar, Timeline, known_steps, timeline
from outlast.v1 import ranks_pb2

# Agents of all nodes are asked, and read what their ranks have noted.
TIMEOUT_S = 60.0
_DIGITS = 4
_POWERS = np.array([float(10**power) for power in range(16)])
# Of any job; a rank says how many its attempt had.
_MOST_RANKS = 1 << 17
# Ranks that are taken in at once, which is some milliseconds of a thread.
_AT_ONCE = 64
# Before and behind the step that is shown: how far clocks are apart follows from what ranks have
# met in.
_CLOCK_STEPS = 4
# Of a second.
_PLACES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """The attempt that is shown, and what all its ranks have in common."""

    attempt: int
    newest: int
    """The job's newest attempt."""
    num_ranks: int
    layout: Layout
    workers_per_node: int

    @property
    def asked(self) -> int:
        """As nodes are asked: 0 for the newest, which only the job's own nodes have."""
        return 0 if self.attempt == self.newest else self.attempt

    def of_world(self, sizes: Iterable[int]) -> _Shown:
        """With as many ranks as an earlier attempt had, as its ranks have noted."""
        if not self.asked:
            return self
        # Whatever a rank has written there.
        found = [self.layout.of_world(size) for size in sizes if 0 < size <= _MOST_RANKS]
        layout = max(found, key=lambda each: each.world_size, default=self.layout)
        return replace(self, layout=layout, num_ranks=layout.world_size)

    def node_stride(self, most_ranks: int) -> int:
        """Of how many nodes the controller asks one."""
        return node_stride(self.layout, self.workers_per_node, most_ranks)

    def about(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "newest_attempt": self.newest,
            "num_ranks": self.num_ranks,
            "layout": _degrees(self.layout),
        }


async def heat_map(
    gateway: Gateway,
    job_id: str,
    measure: Measure,
    *,
    order: Order,
    most_rows: int,
    most_steps: int,
    attempt: int = 0,
    most_ranks: int = 0,
) -> bytes:
    """What all ranks of an attempt (0: the newest) have noted of its newest steps, as JSON.

    Of the newest attempt of a job with more than `most_ranks` ranks (0: any number) only those of
    one node in several, which is there as many times sooner.

    Raises:
        RequestError: there is no such job or attempt, or not all nodes have answered in time.
    """
    shown = await _shown(gateway, job_id, attempt)
    found = HeatMap(
        measure=measure,
        num_ranks=max(1, shown.num_ranks),
        layout=shown.layout,
        most_rows=most_rows,
        most_steps=most_steps,
        order=order,
    )
    known = _Known()

    asked = ranks_pb2.ReadTimesRequest(
        job_id=job_id,
        attempt=shown.asked,
        measure=str(measure),
        most_steps=most_steps,
        most_ranks=most_ranks,
    )
    missing = await _read(gateway, asked, partial(known.put, found))
    shown = shown.of_world(known.sizes)
    found.num_ranks, found.layout = max(1, shown.num_ranks), shown.layout
    stride = 1 if shown.asked else shown.node_stride(most_ranks)
    missing += known.missing(shown, range(shown.num_ranks))
    about = {**shown.about(), "node_stride": stride, "missing": missing}
    return await run_in_threadpool(heat_map_json, about, found)


@dataclass(slots=True)
class _Known:
    """Which ranks have answered, and how many there were by their words."""

    ranks: set[int] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes of which something is missing, and why."""

    def note(self, times: ranks_pb2.ReadTimesResponse) -> None:
        self.ranks.add(times.rank)
        self.sizes.add(times.times.world_size)

    def put(self, found: HeatMap, times: ranks_pb2.ReadTimesResponse) -> None:
        """Note what has come, and add it to a map."""
        self.note(times)
        if times.times.HasField("measured"):
            put_measured(found, times.rank, times.node, times.times.measured)
        else:
            self.silent[times.node] = "its agent is of a version that does not sum up steps"

    def missing(self, shown: _Shown, wanted: range) -> list[dict[str, str]]:
        """What else is missing; where an earlier attempt ran is known of what answers only."""
        found = [{"node": node, "reason": why} for node, why in self.silent.items()]
        lost = len(wanted) - sum(rank in wanted for rank in self.ranks)
        if shown.asked and lost:
            why = f"of {lost} of {len(wanted)} ranks no node that is connected has anything"
            found.append({"node": "", "reason": why})
        return found


def put_measured(found: HeatMap, rank: int, node: str, measured: ranks_pb2.MeasuredSteps) -> None:
    """One more rank, as its agent has summed it up."""
    # An agent of another version may send fewer of one than of the other.
    number = min(len(measured.steps), len(measured.seconds))
    found.put(rank, node, measured.steps[:number], measured.seconds[:number])


def heat_map_json(about: Mapping[str, Any], found: HeatMap) -> bytes:
    """`about`, what is shown and how, steps, and rows of seconds and ratios."""
    facts = {
        **about,
        "measure": str(found.measure),
        "order": str(found.order),
        "alike": [*found.alike],
        "steps": found.steps(),
    }
    # Row by row: the controller's loop gets its turns only between calls of the encoder.
    rows = ",".join(json.dumps(_row_facts(row), separators=(",", ":")) for row in found.rows())
    return f'{json.dumps(facts)[:-1]}, "rows": [{rows}]}}'.encode()


def _row_facts(row: Row) -> dict[str, Any]:
    return {
        "first": row.ranks[0],
        "last": row.ranks[-1],
        "ranks": row.ranks,
        "node": row.node,
        "pp": row.pp,
        "slowest": row.slowest,
        "mean_ratio": round(row.mean_ratio, 3),
        "outliers": row.outliers,
        "seconds": _without_nan(_rounded(row.seconds)),
        "percents": _percents(row.ratios),
    }


async def step_timeline(
    gateway: Gateway, job_id: str, step: int | None, first: int, most: int, attempt: int = 0
) -> dict[str, Any]:
    """What some ranks did in a step; by default in the newest one that all of them have done.

    Raises:
        RequestError: there is no such job, attempt or rank, the step is not known any more, or not
            all nodes have answered in time.
    """
    shown = await _shown(gateway, job_id, attempt)
    done: dict[int, int] = {}
    asked = ranks_pb2.ReadTimesRequest(job_id=job_id, attempt=shown.asked)
    if shown.asked:
        sizes = await _newest_steps(gateway, asked, done)
        shown = shown.of_world(sizes)
    ranks = range(first, min(first + most, shown.num_ranks))
    if not ranks:
        wrong = f"is {first}; allowed: 0 to {shown.num_ranks - 1}"
        raise RequestError(400, f"first: {wrong}", fields=(("first", wrong),))
    if len(ranks) < shown.num_ranks:
        asked = _with(asked, rank=first, num_ranks=len(ranks))
    if step is None and not done:
        await _newest_steps(gateway, asked, done)
    newest = min((done[rank] for rank in ranks if rank in done), default=0)
    shown_step = newest if step is None else step
    kept, missing = await _around(gateway, asked, shown_step, shown.layout)
    known = _Known(ranks={each.rank for each in kept})
    steps = known_steps(kept)
    if step is not None and step not in steps:
        words = f"{steps[0]} to {steps[-1]}" if steps else "none as yet"
        wrong = f"is {step}; known are {words}"
        raise RequestError(404, f"step: {wrong}", fields=(("step", wrong),))
    found = await run_in_threadpool(timeline, kept, shown.layout, shown_step)
    return {
        **shown.about(),
        "steps": steps,
        "missing": [*missing, *known.missing(shown, ranks)],
        **timeline_facts(found),
    }


def _with(question: ranks_pb2.ReadTimesRequest, **more: Any) -> ranks_pb2.ReadTimesRequest:
    """The same question, asked more closely."""
    found = ranks_pb2.ReadTimesRequest(**more)
    found.MergeFrom(question)
    return found


async def _around(
    gateway: Gateway, asked: ranks_pb2.ReadTimesRequest, step: int, layout: Layout
) -> tuple[list[TracedRank], list[dict[str, str]]]:
    """What these ranks did in a step and near it, and the nodes that did not answer."""
    found: dict[int, TracedRank] = {}

    def keep(times: ranks_pb2.ReadTimesResponse) -> None:
        (found[times.rank],) = traced_ranks([times], layout)

    first, last = (max(1, step + by) for by in (-_CLOCK_STEPS, _CLOCK_STEPS))
    missing = await _read(gateway, _with(asked, first_step=first, last_step=last), keep)
    return [found[rank] for rank in sorted(found)], missing


async def _newest_steps(
    gateway: Gateway, asked: ranks_pb2.ReadTimesRequest, done: dict[int, int]
) -> set[int]:
    """Add to `done` the newest step of each of these ranks; how many ranks they say there are."""
    known = _Known()

    def note(times: ranks_pb2.ReadTimesResponse) -> None:
        known.note(times)
        # An agent that does not sum up sends all.
        steps = [*times.times.measured.steps, *(each.step for each in times.times.steps)]
        if steps:
            done[times.rank] = steps[-1]

    await _read(gateway, _with(asked, measure=str(Measure.STEP), most_steps=1), note)
    return known.sizes


def timeline_facts(shown: Timeline) -> dict[str, Any]:
    """The step, and what each rank did in it."""
    return {
        "step": shown.step,
        "begun_at_s": shown.begun_ns / 1e9,
        "length_s": shown.length_s,
        "clocks_apart_s": shown.apart_s,
        "tracks": [
            {
                "rank": track.rank,
                "node": track.node,
                "pp": track.pp,
                "step_s": round(track.step_s, _PLACES),
                "bubble_s": round(track.bubble_s, _PLACES),
                "exposed_s": round(track.exposed_s, _PLACES),
                "hidden_s": round(track.hidden_s, _PLACES),
                "bars": [_bar_facts(bar) for bar in track.bars],
            }
            for track in shown.tracks
        ],
    }


def _bar_facts(bar: Bar) -> dict[str, Any]:
    found = asdict(bar)
    seconds = [name for name, value in found.items() if isinstance(value, float)]
    return {**found, **{name: round(found[name], _PLACES) for name in seconds}}


async def _shown(gateway: Gateway, job_id: str, attempt: int) -> _Shown:
    asked = ranks_pb2.ListRanksRequest(job_id=job_id, most=1)
    found = await gateway.call(method("Ranks/ListRanks"), asked)
    assert isinstance(found, ranks_pb2.ListRanksResponse)
    layout = Layout(tp=found.tp, pp=found.pp, dp=found.dp, ep=found.ep, cp=found.cp or 1)
    return _Shown(
        attempt=attempt or found.attempt,
        newest=found.attempt,
        num_ranks=found.num_ranks,
        layout=layout,
        workers_per_node=found.workers_per_node,
    )


async def _read(
    gateway: Gateway,
    question: ranks_pb2.ReadTimesRequest,
    take: Callable[[ranks_pb2.ReadTimesResponse], None],
) -> list[dict[str, str]]:
    """Hand over what ranks have noted; the nodes that did not answer."""
    missing = []
    waiting: list[ranks_pb2.ReadTimesResponse] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for each in gateway.stream(method("Ranks/ReadTimes"), question):
                assert isinstance(each, ranks_pb2.ReadTimesResponse)
                if each.HasField("missing"):
                    missing.append({"node": each.node, "reason": each.missing.reason})
                else:
                    waiting.append(each)
                if len(waiting) == _AT_ONCE:
                    # There may be thousands, and some take milliseconds.
                    await run_in_threadpool(_take_all, take, waiting)
                    waiting = []
            await run_in_threadpool(_take_all, take, waiting)
    except TimeoutError as error:
        wrong = f"not all nodes have answered within {TIMEOUT_S:g} s"
        raise RequestError(504, wrong, reason="DEADLINE_EXCEEDED") from error
    return missing


def _take_all(
    take: Callable[[ranks_pb2.ReadTimesResponse], None],
    answers: Sequence[ranks_pb2.ReadTimesResponse],
) -> None:
    for each in answers:
        take(each)


def _degrees(layout: Layout) -> dict[str, int]:
    names = ("tp", "pp", "dp", "ep", "cp")
    return {name: getattr(layout, name) for name in names}


def _rounded(seconds: Floats) -> Floats:
    """To so many digits that count, and so that they are printed as such."""
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitudes = np.nan_to_num(np.floor(np.log10(seconds)), nan=0, neginf=0, posinf=0)
    # What a whole number is divided by has to be exact.
    scales = _POWERS[np.clip(_DIGITS - 1 - magnitudes, 0, len(_POWERS) - 1).astype(int)]
    found: Floats = np.round(seconds * scales) / scales
    return found


def _percents(ratios: Floats) -> list[int | None]:
    """Whole numbers: browsers read them several times as fast as others."""
    known = ~np.isnan(ratios)
    found: list[int | None] = np.where(known, np.round(100 * ratios), 0).astype(int).tolist()
    if known.all():
        return found
    return [value if is_known else None for value, is_known in zip(found, known, strict=True)]


def _without_nan(values: Floats) -> list[float | None]:
    found: list[float | None] = values.tolist()
    return [None if each != each else each for each in found] if np.isnan(values).any() else found
