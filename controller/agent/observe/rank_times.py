"""When a rank's last operations, steps, phases and passes began and ended: from its black box."""

from __future__ import annotations

from pathlib import Path

from outlast.blackbox import OpRecord, Pass, Phase, Present, Reader, SpanRecord
from outlast.v1 import ranks_pb2


def rank_times(path: Path) -> ranks_pb2.RankTimes | None:
    """What is still in the box; None when there is none that can be read."""
    try:
        reader = Reader(path)
    except (OSError, ValueError):
        return None
    try:
        now = reader.present()
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
                for each in _operations(reader, now)
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
                for each in _spans(reader, now)
            ],
        )
    except ValueError:
        # Whatever a rank has written there, it is that rank's trouble alone.
        return None
    finally:
        reader.close()


def _operations(reader: Reader, now: Present) -> list[OpRecord]:
    """What has ended, and the operation that the rank is in."""
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


def _spans(reader: Reader, now: Present) -> list[SpanRecord]:
    """What has ended, and the phase that the rank is in."""
    ended = reader.spans()
    # It may have ended since `now`.
    is_known = any(
        each.work is Pass.NONE and each.start_ns == now.phase_since_ns for each in ended[-64:]
    )
    if is_known or now.phase is Phase.FINISHED:
        return ended
    under_way = SpanRecord(phase=now.phase, start_ns=now.phase_since_ns, end_ns=0, waited_ns=0)
    return [*ended, under_way]
