"""When a rank's last operations, steps, phases and passes began and ended: from its black box."""

from __future__ import annotations

from pathlib import Path

from outlast.blackbox import (
    NUM_STEP_RECORDS,
    OpRecord,
    Pass,
    Phase,
    Reader,
    SpanRecord,
)
from outlast.layout import Layout
from outlast.trace.heat import Measure, measured
from outlast.trace.ranks import traced_ranks
from outlast.v1 import ranks_pb2


def rank_times(
    path: Path, measure: Measure | None = None, most_steps: int = 0
) -> ranks_pb2.RankTimes | None:
    """What is still in the box; None when there is none that can be read.

    With a measure it is summed up: a box has half a megabyte, and what 400 steps took by one
    measure takes three kilobytes.
    """
    try:
        reader = Reader(path)
    except (OSError, ValueError):
        return None
    try:
        times = _times(reader, measure)
    except ValueError:
        # Whatever a rank has written there, it is that rank's trouble alone.
        return None
    finally:
        reader.close()
    return times if measure is None else _summed_up(times, measure, most_steps or NUM_STEP_RECORDS)


def _times(reader: Reader, measure: Measure | None) -> ranks_pb2.RankTimes:
    """All, or as much of it as the measure is made of."""
    is_of_operations = measure in (None, Measure.WORK, Measure.WAITING)
    is_of_spans = measure is None or not (is_of_operations or measure is Measure.STEP)
    return ranks_pb2.RankTimes(
        operations=[
            ranks_pb2.TimedOperation(
                op=each.op.name.lower(),
                group=each.group.name.lower(),
                sequence=each.seq,
                detail=each.detail,
                start_ns=each.start_ns,
                end_ns=each.end_ns,
            )
            for each in (_operations(reader) if is_of_operations else ())
        ],
        steps=[
            ranks_pb2.TimedStep(step=each.step, start_ns=each.start_ns, end_ns=each.end_ns)
            for each in reader.new_steps()
        ],
        spans=[
            ranks_pb2.TimedSpan(
                phase=each.phase.name.lower(),
                work="" if each.work is Pass.NONE else each.work.name.lower(),
                chunk=each.chunk,
                micro_batch=each.micro_batch,
                start_ns=each.start_ns,
                end_ns=each.end_ns,
                waited_ns=each.waited_ns,
            )
            for each in (_spans(reader) if is_of_spans else ())
        ],
    )


def _summed_up(
    times: ranks_pb2.RankTimes, measure: Measure, most_steps: int
) -> ranks_pb2.RankTimes:
    # Which rank it is, and where, is not part of the sum.
    (rank,) = traced_ranks([ranks_pb2.ReadTimesResponse(times=times)], Layout())
    found = measured(rank, measure, most_steps)
    steps = ranks_pb2.MeasuredSteps(steps=list(found), seconds=list(found.values()))
    return ranks_pb2.RankTimes(measured=steps)


def _operations(reader: Reader) -> list[OpRecord]:
    """What has ended, and the operation that the rank is in."""
    now = reader.present()
    ended = reader.ops()
    if now.last_operation is None or not now.last_operation.is_inside:
        return ended
    under_way = OpRecord(
        op=now.op,
        group=now.group,
        seq=now.op_seq,
        detail=now.detail,
        start_ns=now.op_entered_ns,
        end_ns=0,
    )
    return [*ended, under_way]


def _spans(reader: Reader) -> list[SpanRecord]:
    """What has ended, and the phase that the rank is in."""
    now = reader.present()
    ended = reader.spans()
    # It may have ended since.
    is_known = any(
        each.work is Pass.NONE and each.start_ns == now.phase_since_ns for each in reversed(ended)
    )
    if is_known or now.phase is Phase.FINISHED:
        return ended
    under_way = SpanRecord(phase=now.phase, start_ns=now.phase_since_ns, end_ns=0, waited_ns=0)
    return [*ended, under_way]
