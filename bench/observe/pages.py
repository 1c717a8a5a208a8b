"""What the web page loads of a job of 10,000 ranks: the heat map, and a step's timeline.

Black boxes are written here, one for all ranks; from reading it on everything is as in agents and
controller, without what is between them.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from random import Random
from typing import Any

from controller.agent.observe.rank_times import measured_times, rank_times
from controller.web.compression import LEVEL
from controller.web.noted import heat_map_json, put_measured, timeline_facts
from outlast.blackbox import Group, Op, OpRecord, Pass, Phase, SpanRecord, StepRecord, Writer
from outlast.layout import Layout
from outlast.trace.heat import Measure
from outlast.trace.heat_map import HeatMap
from outlast.trace.ranks import TracedRank, traced_ranks
from outlast.trace.timeline import timeline
from outlast.v1 import ranks_pb2
from outlast.worker_contract import BLACK_BOX_RECORDS

NUM_RANKS, SMALL_RANKS = 10_000, 64
# What the page asks for.
_ROWS, _STEPS, _SHOWN = 1024, 1000, 64
# So many ranks are unlike each other.
_KINDS = 64
_LAST_STEP = 1024
# The one that is known of all steps that are kept.
_MEASURE = Measure.STEP
_OPS_PER_STEP, _PASSES_PER_STEP = 40, 16
_STEP_NS = 10**9


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """CPU seconds, and bytes of the answers."""
    num_ranks = SMALL_RANKS if small else NUM_RANKS
    layout = Layout(tp=8, dp=num_ranks // 8)
    path = folder / "box"
    _write_box(path)
    noted = rank_times(path)
    # As the page asks: the steps around the one that is shown say how far clocks are apart.
    around = rank_times(path, range(_LAST_STEP - 4, _LAST_STEP + 5))
    assert noted is not None
    assert around is not None
    return {
        "ranks": num_ranks,
        "noted_bytes": noted.ByteSize(),
        "heat_map": _heat_map(path, layout, num_ranks),
        "timeline": {"sent_bytes": around.ByteSize() * _SHOWN, **_timeline(around, layout)},
    }


def _heat_map(path: Path, layout: Layout, num_ranks: int) -> dict[str, Any]:
    begun_s = time.process_time()
    summed_up = measured_times(path, _MEASURE, _STEPS)
    agent_s = time.process_time() - begun_s
    assert summed_up is not None
    sent = [_varied(summed_up, Random(number)) for number in range(_KINDS)]
    found = HeatMap(
        measure=_MEASURE,
        num_ranks=num_ranks,
        layout=layout,
        most_rows=_ROWS,
        most_steps=_STEPS,
    )
    begun_s = time.process_time()
    for rank in range(num_ranks):
        times = _response(rank, sent[rank % _KINDS])
        put_measured(found, rank, times.node, times.times.measured)
    answer = heat_map_json({}, found)
    return {
        "agent_s": agent_s,
        "sent_bytes": len(sent[0]) * num_ranks,
        "cpu_s": time.process_time() - begun_s,
        **_sizes(answer),
    }


def _timeline(noted: ranks_pb2.RankTimes, layout: Layout) -> dict[str, Any]:
    sent = [_varied(noted, Random(number)) for number in range(_SHOWN)]
    begun_s = time.process_time()
    shown: list[TracedRank] = []
    for rank in range(_SHOWN):
        shown += traced_ranks([_response(rank, sent[rank])], layout)
    answer = json.dumps(timeline_facts(timeline(shown, layout, _LAST_STEP))).encode()
    return {"ranks": _SHOWN, "cpu_s": time.process_time() - begun_s, **_sizes(answer)}


def _varied(times: ranks_pb2.RankTimes, random: Random) -> bytes:
    """The times of another rank: no two take equally long, as what is equal compresses well."""
    other = ranks_pb2.RankTimes()
    other.CopyFrom(times)
    for operation in other.operations:
        operation.end_ns += random.randrange(5_000_000)
    for span in other.spans:
        span.end_ns += random.randrange(5_000_000)
    other.measured.seconds[:] = [
        seconds * random.uniform(0.9, 1.1) for seconds in times.measured.seconds
    ]
    return other.SerializeToString()


def _response(rank: int, sent: bytes) -> ranks_pb2.ReadTimesResponse:
    found = ranks_pb2.ReadTimesResponse(rank=rank, node=f"node-{rank // 8:05d}")
    found.times.ParseFromString(sent)
    return found


def _sizes(answer: bytes) -> dict[str, int]:
    return {"bytes": len(answer), "gzip_bytes": len(gzip.compress(answer, LEVEL))}


def _write_box(path: Path) -> None:
    """A rank that has trained for long: its black box is full."""
    box = Writer(path, rank=0, world_size=1, attempt=1)
    for step in range(1, _LAST_STEP + 1):
        box.completed(
            StepRecord(
                step=step,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1e-3,
                tokens=8,
                start_ns=step * _STEP_NS,
                end_ns=(step + 1) * _STEP_NS,
                eval_loss=None,
            )
        )
    for number in range(BLACK_BOX_RECORDS):
        start_ns = _moment_ns(number, _OPS_PER_STEP)
        box.ended(
            OpRecord(
                op=Op.ALL_GATHER,
                group=Group.TP,
                seq=number,
                detail=-1,
                start_ns=start_ns,
                end_ns=start_ns + 5_000_000,
            )
        )
        start_ns = _moment_ns(number, _PASSES_PER_STEP)
        box.add_span(
            SpanRecord(
                phase=Phase.FORWARD_BACKWARD,
                work=Pass.FORWARD if number % 2 else Pass.BACKWARD,
                micro_batch=number % _PASSES_PER_STEP // 2,
                start_ns=start_ns,
                end_ns=start_ns + 60_000_000,
                waited_ns=10_000_000,
            )
        )
    box.close()


def _moment_ns(number: int, per_step: int) -> int:
    """Of the newest records the last is in the last step, `per_step` in each."""
    step = _LAST_STEP - (BLACK_BOX_RECORDS - 1 - number) // per_step
    return step * _STEP_NS + number % per_step * (_STEP_NS // per_step)
