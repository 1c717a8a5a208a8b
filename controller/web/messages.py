"""Protobuf messages as JSON: the names of the protos, every field, and numbers as numbers.

It differs from protobuf's own JSON where that is of no use to a page: integers of 64 bits are
numbers there, too, not text (all of ours are below 2^53), what is absent is null, and NaN and Inf,
which JSON has not, are null. Bytes are logs, which are text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

# What a field of bytes is called, which no page could show.
TEXT = "text"
STRUCT = "google.protobuf.Struct"


def as_json(message: Message, leave_out: Collection[str] = ()) -> Any:
    """The message as a value for `json.dumps`, without these fields of its own."""
    if message.DESCRIPTOR.full_name == STRUCT:
        return MessageToDict(message)
    return {
        name_of(field): _value(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name not in leave_out
    }


def name_of(field: FieldDescriptor) -> str:
    """What a field is called in JSON."""
    return TEXT if field.type == FieldDescriptor.TYPE_BYTES else field.name


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is one from keys to values."""
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry


def _value(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    one = _of(field)
    if is_map(field):
        return {str(key): _plain(each) for key, each in value.items()}
    if field.label == FieldDescriptor.LABEL_REPEATED:
        return [one(each) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return one(value)


def _of(field: FieldDescriptor) -> Callable[[Any], Any]:
    return _plain if field.message_type is None else as_json


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
