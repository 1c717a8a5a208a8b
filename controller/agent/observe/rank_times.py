"""When a rank's last operations, steps, phases and passes began and ended: from its black box."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from controller.agent.observe.measures import measured
from outlast.blackbox import (
    NUM_STEP_RECORDS,
    OpRecord,
    Pass,
    Phase,
    Reader,
    SpanRecord,
    StepRecord,
)
from outlast.blackbox.file import MAX_NS
from outlast.trace.heat import Measure
from outlast.v1 import ranks_pb2


def rank_times(
    path: Path, within: range | None = None, since_ns: int = 0
) -> ranks_pb2.RankTimes | None:
    """What is still in the box and had not ended before a moment; of operations and spans only
    what lies `within` some steps.

    None when there is no box that can be read.
    """

    def read(reader: Reader) -> ranks_pb2.RankTimes:
        steps, operations, spans = reader.new_steps(), _operations(reader), _spans(reader)
        if within is None and not since_ns:
            return _message(steps, operations, spans)
        steps = [each for each in steps if each.end_ns > since_ns]
        chosen = [each for each in steps if within is None or each.step in within]
        begun_ns = max(since_ns, min((each.start_ns for each in chosen), default=0))
        # What goes on is of no step yet.
        ended_ns = max((each.end_ns for each in chosen), default=0) if within else MAX_NS
        found = _message(
            steps,
            [each for each in operations if _overlaps(each, begun_ns, ended_ns)],
            [each for each in spans if _overlaps(each, begun_ns, ended_ns)],
        )
        found.known_since_ns = min((each.start_ns for each in operations), default=0)
        return found

    return _read(path, read)


def measured_times(path: Path, measure: Measure, most_steps: int = 0) -> ranks_pb2.RankTimes | None:
    """What the newest steps took by a measure; None when there is no box that can be read."""

    def read(reader: Reader) -> ranks_pb2.RankTimes:
        is_alone = reader.present().world_size == 1
        found = measured(reader.step_parts(), measure, most_steps or NUM_STEP_RECORDS, is_alone)
        steps = ranks_pb2.MeasuredSteps(steps=list(found), seconds=list(found.values()))
        return ranks_pb2.RankTimes(measured=steps)

    return _read(path, read)


def _read(path: Path, read: Callable[[Reader], ranks_pb2.RankTimes]) -> ranks_pb2.RankTimes | None:
    try:
        reader = Reader(path)
    except (OSError, ValueError):
        return None
    try:
        found = read(reader)
        found.world_size = reader.present().world_size
        return found
    except ValueError:
        # Whatever a rank has written there, it is that rank's trouble alone.
        return None
    finally:
        reader.close()


def _message(
    steps: Iterable[StepRecord], operations: Iterable[OpRecord], spans: Iterable[SpanRecord]
) -> ranks_pb2.RankTimes:
    return ranks_pb2.RankTimes(
        operations=[
            ranks_pb2.TimedOperation(
                op=each.op.name.lower(),
                group=each.group.name.lower(),
                sequence=each.seq,
                detail=each.detail,
                start_ns=each.start_ns,
                end_ns=each.end_ns,
                departed_ns=each.departed_ns,
                peer=each.peer if each.peer >= 0 else None,
                message=each.message if each.message >= 0 else None,
            )
            for each in operations
        ],
        steps=[
            ranks_pb2.TimedStep(step=each.step, start_ns=each.start_ns, end_ns=each.end_ns)
            for each in steps
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
            for each in spans
        ],
    )


def _overlaps(record: OpRecord | SpanRecord, begun_ns: int, ended_ns: int) -> bool:
    is_begun = record.start_ns < ended_ns
    # One that has not ended has 0.
    return is_begun and (record.end_ns == 0 or record.end_ns > begun_ns)


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
        peer=now.peer,
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
