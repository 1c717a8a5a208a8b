"""Protobuf messages as the JSON API has them: `outlast.facts`, with bytes of logs as text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outlast.facts import facts, finite

# What a field of bytes is called, which no page could show.
TEXT = "text"
STRUCT = "google.protobuf.Struct"


def as_json(message: Message, leave_out: Collection[str] = ()) -> Any:
    """The message as a value for `json.dumps`, without these fields of its own."""
    value = finite(facts(message, leave_out))
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_BYTES and field.name in value:
            value[name_of(field)] = value.pop(field.name).decode(errors="replace")
    return value


def name_of(field: FieldDescriptor) -> str:
    """What a field is called in JSON."""
    return TEXT if field.type == FieldDescriptor.TYPE_BYTES else field.name


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is one from keys to values."""
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry
