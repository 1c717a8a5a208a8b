"""Ranks of hangs in the words that people read: "in dp all_reduce #3"."""

from __future__ import annotations

from collections.abc import Mapping

from controller.operations import set_operation
from diagnostics.core.rank_facts import Groups, RankFacts, facts_of
from outlast.blackbox.records import Group, Op, Operation, Phase, member
from outlast.layout import Layout
from outlast.v1 import agents_pb2


def operation_from(words: str) -> Operation | None:
    """What `str` of an operation says; None for ""."""
    if not words:
        return None
    match words.split():
        case ["in" | "after" as where, group, op, number]:
            root = "-1"
        case ["in" | "after" as where, group, op, number, "from", root]:
            pass
        case _:
            raise ValueError(f"{words!r} is no operation")
    return Operation(
        op=member(Op, op),
        group=member(Group, group),
        seq=int(number.removeprefix("#")),
        detail=int(root),
        is_inside=where == "in",
    )


def message_from(words: str) -> agents_pb2.Operation:
    """The same as it goes over the wire."""
    message = agents_pb2.RankSummary()
    set_operation(message, operation_from(words))
    return message.last_operation


def facts_from_words(
    rank: int,
    phase: str,
    last_op: str,
    layout: Layout,
    *,
    since_s: float = 0.0,
    entered: Mapping[str, int] | None = None,
    process_state: str = "",
) -> RankFacts:
    """As a heartbeat would have it."""
    return facts_of(
        rank,
        member(Phase, phase),
        operation_from(last_op),
        Groups(layout),
        since_s=since_s,
        entered={member(Group, name): seq for name, seq in (entered or {}).items()},
        process_state=process_state,
    )
