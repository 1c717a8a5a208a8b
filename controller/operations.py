"""The operation that a rank entered last, put into messages; `core/edge/operations.py` reads it."""

from __future__ import annotations

from outlast.blackbox.records import Operation
from outlast.v1 import agents_pb2


def set_operation(
    message: agents_pb2.RankSummary | agents_pb2.WorkerExit, operation: Operation | None
) -> None:
    """Put it into a message, if there is any."""
    if operation is not None:
        message.last_operation.CopyFrom(
            agents_pb2.Operation(
                op=operation.op.name.lower(),
                group=operation.group.name.lower(),
                sequence=operation.seq,
                detail=operation.detail,
                is_inside=operation.is_inside,
                peer=operation.peer if operation.peer >= 0 else None,
            )
        )
