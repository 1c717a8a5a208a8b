"""When a rank's last operations and steps began and ended, out of its black box."""

from __future__ import annotations

from pathlib import Path

from outlast.blackbox import OpRecord, Reader
from outlast.v1 import ranks_pb2


def rank_times(path: Path) -> ranks_pb2.RankTimes | None:
    """What is still in the box; None when there is none that can be read."""
    try:
        reader = Reader(path)
    except (OSError, ValueError):
        return None
    try:
        now = reader.present()
        under_way = OpRecord(
            op=now.op,
            group=now.group,
            seq=now.op_seq,
            detail=now.detail,
            start_ns=now.op_entered_ns,
            end_ns=0,
        )
        is_inside = now.last_operation is not None and now.last_operation.is_inside
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
                for each in (*reader.ops(), *([under_way] if is_inside else []))
            ],
            steps=[
                ranks_pb2.TimedStep(step=each.step, start_ns=each.start_ns, end_ns=each.end_ns)
                for each in reader.new_steps()
            ],
        )
    except ValueError:
        # Whatever a rank has written there, it is that rank's trouble alone.
        return None
    finally:
        reader.close()
