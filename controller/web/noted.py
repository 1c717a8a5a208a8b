"""What ranks have noted of themselves, for the JSON API: a heat map, and the timeline of a step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from controller.web.gateway import Gateway, RequestError
from controller.web.routes import method
from outlast.layout import Layout
from outlast.trace.heat import Measure
from outlast.trace.heat_map import Floats, HeatMap, Order, Row
from outlast.trace.ranks import TracedRank, traced_ranks
from outlast.trace.timeline import Bar, Timeline, known_steps, timeline
from outlast.v1 import ranks_pb2

# Agents of all nodes are asked, and read what their ranks have noted.
TIMEOUT_S = 60.0
_DIGITS = 4
_POWERS = np.array([float(10**power) for power in range(16)])
# Ranks that are taken in at once, which is some milliseconds of a thread.
_AT_ONCE = 64
# Before and behind the step that is shown: how far clocks are apart follows from what ranks have
# met in.
_CLOCK_STEPS = 4
# Of a second.
_PLACES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """What all ranks of a job have in common."""

    attempt: int
    num_ranks: int
    layout: Layout


async def heat_map(
    gateway: Gateway,
    job_id: str,
    measure: Measure,
    *,
    order: Order,
    most_rows: int,
    most_steps: int,
) -> bytes:
    """What all ranks have noted of their newest steps, as JSON.

    Raises:
        RequestError: there is no such job, or not all nodes have answered in time.
    """
    listed = await _listed(gateway, job_id)
    found = HeatMap(
        measure=measure,
        num_ranks=max(1, listed.num_ranks),
        layout=listed.layout,
        most_rows=most_rows,
        most_steps=most_steps,
        order=order,
    )

    def put(times: ranks_pb2.ReadTimesResponse) -> None:
        if times.times.HasField("measured"):
            steps = times.times.measured
            put_measured(found, times.rank, times.node, steps)
        else:
            # Of an agent that does not sum up.
            (rank,) = traced_ranks([times], listed.layout)
            found.add(rank)

    asked = ranks_pb2.ReadTimesRequest(job_id=job_id, measure=str(measure), most_steps=most_steps)
    missing = await _read(gateway, [asked], put)
    about = {
        "attempt": listed.attempt,
        "measure": str(measure),
        "order": str(order),
        "num_ranks": listed.num_ranks,
        "layout": _degrees(listed.layout),
        "missing": missing,
    }
    return await run_in_threadpool(heat_map_json, about, found)


def put_measured(found: HeatMap, rank: int, node: str, measured: ranks_pb2.MeasuredSteps) -> None:
    """One more rank, as its agent has summed it up."""
    # An agent of another version may send fewer of one than of the other.
    number = min(len(measured.steps), len(measured.seconds))
    found.put(rank, node, measured.steps[:number], measured.seconds[:number])


def heat_map_json(about: Mapping[str, Any], found: HeatMap) -> bytes:
    """`about`, what equal peers have in common, steps, and rows of seconds and ratios."""
    facts = {**about, "alike": [*found.alike], "steps": found.steps()}
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
    gateway: Gateway, job_id: str, step: int | None, first: int, most: int
) -> dict[str, Any]:
    """What some ranks did in a step; by default in the newest one that all of them have done.

    Raises:
        RequestError: there is no such job or rank, the step is not known any more, or not all
            nodes have answered in time.
    """
    listed = await _listed(gateway, job_id)
    ranks = range(first, min(first + most, listed.num_ranks))
    if not ranks:
        wrong = f"is {first}; allowed: 0 to {listed.num_ranks - 1}"
        raise RequestError(400, f"first: {wrong}", fields=(("first", wrong),))
    # One question for all of them, where they are all.
    asked = (None,) if len(ranks) == listed.num_ranks else (*ranks,)
    shown_step = await _newest_step(gateway, job_id, asked) if step is None else step
    kept, missing = await _around(gateway, job_id, asked, shown_step, listed.layout)
    steps = known_steps(kept)
    if step is not None and step not in steps:
        known = f"{steps[0]} to {steps[-1]}" if steps else "none as yet"
        wrong = f"is {step}; known are {known}"
        raise RequestError(404, f"step: {wrong}", fields=(("step", wrong),))
    shown = await run_in_threadpool(timeline, kept, listed.layout, shown_step)
    return {
        "attempt": listed.attempt,
        "num_ranks": listed.num_ranks,
        "layout": _degrees(listed.layout),
        "steps": steps,
        "missing": missing,
        **timeline_facts(shown),
    }


async def _around(
    gateway: Gateway, job_id: str, ranks: Iterable[int | None], step: int, layout: Layout
) -> tuple[list[TracedRank], list[dict[str, str]]]:
    """What these ranks did in a step and near it, and the nodes that did not answer."""
    found: dict[int, TracedRank] = {}

    def keep(times: ranks_pb2.ReadTimesResponse) -> None:
        (found[times.rank],) = traced_ranks([times], layout)

    first, last = (max(1, step + by) for by in (-_CLOCK_STEPS, _CLOCK_STEPS))
    questions = [
        ranks_pb2.ReadTimesRequest(job_id=job_id, rank=rank, first_step=first, last_step=last)
        for rank in ranks
    ]
    missing = await _read(gateway, questions, keep)
    return [found[rank] for rank in sorted(found)], missing


async def _newest_step(gateway: Gateway, job_id: str, ranks: Iterable[int | None]) -> int:
    """The newest that all of these ranks have done; 0 for none."""
    done: list[int] = []

    def note(times: ranks_pb2.ReadTimesResponse) -> None:
        # An agent that does not sum up sends all.
        steps = [*times.times.measured.steps, *(each.step for each in times.times.steps)]
        done.extend(steps[-1:])

    questions = [
        ranks_pb2.ReadTimesRequest(
            job_id=job_id, rank=rank, measure=str(Measure.STEP), most_steps=1
        )
        for rank in ranks
    ]
    await _read(gateway, questions, note)
    return min(done, default=0)


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


async def _listed(gateway: Gateway, job_id: str) -> _Listed:
    asked = ranks_pb2.ListRanksRequest(job_id=job_id, most=1)
    found = await gateway.call(method("Ranks/ListRanks"), asked)
    assert isinstance(found, ranks_pb2.ListRanksResponse)
    layout = Layout(tp=found.tp, pp=found.pp, dp=found.dp, ep=found.ep)
    return _Listed(attempt=found.attempt, num_ranks=found.num_ranks, layout=layout)


async def _read(
    gateway: Gateway,
    questions: Iterable[ranks_pb2.ReadTimesRequest],
    take: Callable[[ranks_pb2.ReadTimesResponse], None],
) -> list[dict[str, str]]:
    """Hand over what ranks have noted; the nodes that did not answer."""
    missing = []
    waiting: list[ranks_pb2.ReadTimesResponse] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for question in questions:
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
    return {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}


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
