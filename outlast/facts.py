"""Protobuf messages as plain values, for JSON that programs read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message


def facts(message: Message, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """A protobuf message as plain values under its field names, without those to be left out.

    Every field is there: absent optional ones are None, and integers stay
    integers (protobuf's own JSON turns 64-bit ones into strings).
    """
    if message.DESCRIPTOR.full_name == "google.protobuf.Struct":
        return _struct(message)
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name not in leave_out
    }


def finite(value: Any) -> Any:
    """The value with null for NaN and infinities, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.has_presence:
        if not message.HasField(field.name):
            return None
        return value if field.message_type is None else facts(value)
    # A map, whose values are plain: how a descriptor says so differs between protobuf
    # releases, as it does for "repeated".
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str | bytes | int | float):
        return value
    return [item if field.message_type is None else facts(item) for item in value]


def _struct(message: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    found = _whole(MessageToDict(message))
    assert isinstance(found, dict)
    return found


def _whole(value: Any) -> Any:
    """A Struct has doubles only; the integers among them were integers."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
