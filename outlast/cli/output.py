"""Facts to standard output: JSON for programs, aligned text and tables for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

LABEL_WIDTH = 11


def print_json(value: object) -> None:
    """One JSON document, indented; NaN and infinities become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def print_json_line(value: object) -> None:
    """One JSON document on one line, written at once: an element of a stream."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def facts(message: Message) -> dict[str, Any]:
    """A protobuf message as plain values under its field names.

    Every field is there: absent optional ones are None, and integers stay
    integers (protobuf's own JSON turns 64-bit ones into strings).
    """
    if message.DESCRIPTOR.full_name == "google.protobuf.Struct":
        return _struct(message)
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Labelled lines; a label repeated is printed once, further lines of a text are indented."""
    last = ""
    for label, text in lines:
        shown = "" if label == last else label
        last = label
        first, *rest = text.splitlines() or [""]
        print(f"{shown:<{LABEL_WIDTH}} {first}")
        for line in rest:
            print(f"{'':<{LABEL_WIDTH}} {line}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Columns as wide as their widest cell; the last one is free to be long."""
    if not rows:
        print(empty)
        return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)]
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join((*cells, row[-1])).rstrip())


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
