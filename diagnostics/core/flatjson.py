"""Flat frozen dataclasses to one line of JSON and back, strictly.

Findings and measurements travel between processes as JSON lines. A line that
does not fit its class exactly is refused: a half-understood result must not
become a verdict on a node.

What does not belong here: nested values. A result is one flat record.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import asdict, fields
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def to_json(record: DataclassInstance) -> str:
    """`record` as one line of JSON.

    Raises:
        ValueError: a number is not finite; JSON has no word for it.
    """
    return json.dumps(asdict(record), allow_nan=False, ensure_ascii=True)


def from_json(kind: type[T], text: str) -> T:
    """The record of class `kind` that `text` holds.

    Raises:
        ValueError: not JSON, a field is missing, unknown or of another type.
    """
    raw: object = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {text[:80]!r}")
    hints = get_type_hints(kind)
    expected = {field.name for field in fields(kind)}
    if raw.keys() != expected:
        missing, unknown = sorted(expected - raw.keys()), sorted(raw.keys() - expected)
        raise ValueError(f"{kind.__name__}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{name: _convert(kind, name, hints[name], raw[name]) for name in raw})


def _convert(kind: type, name: str, hint: object, value: object) -> object:
    if get_origin(hint) in (types.UnionType, Union):
        if value is None:
            return None
        (hint,) = (choice for choice in get_args(hint) if choice is not types.NoneType)
    if isinstance(hint, type) and issubclass(hint, StrEnum) and isinstance(value, str):
        return hint(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number and math.isfinite(value):  # type: ignore[arg-type]  # narrowed by is_number
        return float(value)  # type: ignore[arg-type]  # narrowed by is_number
    raise ValueError(f"{kind.__name__}.{name}: {value!r} does not fit")
