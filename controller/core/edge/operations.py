"""The operation that a rank entered last, as messages of agents have it."""

from __future__ import annotations

from outlast.blackbox.records import Group, Op, Operation, member
from outlast.v1 import agents_pb2


def operation_of(message: agents_pb2.RankSummary | agents_pb2.WorkerExit) -> Operation | None:
    """The operation in a message, if there is any.

    Raises:
        ValueError: it is one that this version does not know.
    """
    if not message.HasField("last_operation"):
        return None
    last = message.last_operation
    return Operation(
        op=member(Op, last.op),
        group=member(Group, last.group),
        seq=last.sequence,
        detail=last.detail,
        is_inside=last.is_inside,
        peer=last.peer if last.HasField("peer") else -1,
    )
