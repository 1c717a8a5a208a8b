"""Changes that only the journal has: what several changes, or a whole record, come to in it.

The machine decides a record as a whole and an order for each node. Written so, the journal would
repeat the spec and the nodes of a job in each of its states, and the same order for each node.
`batches` makes these of a batch; folding them gives the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from controller.core.frozen import replace
from controller.core.incident_record import IncidentRecord
from controller.core.orders import Command, CommandRecord
from controller.core.records import JobRecord, NodeRecord
from outlast.ids import Attempt, CommandId, JobId, NodeId

_Record = TypeVar("_Record", JobRecord, NodeRecord, IncidentRecord)
Values = tuple[tuple[str, object], ...]


class RecordKind(StrEnum):
    """Which table a record is in."""

    JOB = "job"
    NODE = "node"
    INCIDENT = "incident"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChanged:
    """These fields of a record have other values now."""

    kind: RecordKind
    # Its id.
    key: str
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandsOpened:
    """The same command is to be carried out on each of these nodes.

    Its id is `id_prefix` with the node's name.
    """

    id_prefix: str
    nodes: tuple[NodeId, ...]
    job: JobId | None
    attempt: Attempt
    issued_s: float
    command: Command

    def one_by_one(self) -> Iterator[CommandRecord]:
        for node in self.nodes:
            yield CommandRecord(
                command_id=CommandId(self.id_prefix + node),
                node=node,
                job=self.job,
                attempt=self.attempt,
                issued_s=self.issued_s,
                command=self.command,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandsClosed:
    """These commands were answered alike. The id of each is `id_prefix` with its name."""

    id_prefix: str
    names: tuple[str, ...]
    why: str


def difference(before: _Record, after: _Record) -> Values:
    """The fields that differ, with their new values."""
    kind: Any = type(after)
    names, values_of = _reader(kind)
    pairs = zip(names, values_of(before), values_of(after), strict=True)
    return tuple((name, new) for name, old, new in pairs if old is not new and old != new)


@cache
def _reader(kind: Any) -> tuple[tuple[str, ...], attrgetter[tuple[object, ...]]]:
    """The names of a record's fields, and what reads them all."""
    names = tuple(item.name for item in fields(kind))
    return names, attrgetter(*names)


def changed(record: _Record, values: Values) -> _Record:
    """The record with these values."""
    by_name: dict[str, Any] = dict(values)
    return replace(record, **by_name)
