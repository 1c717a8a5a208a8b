"""Records to and from plain JSON values, by their type annotations.

A union of dataclasses is tagged with the class name under "is". Unknown keys
are ignored and missing ones take their default, so that a newer controller can
fold an older journal.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from controller.core.facts import Fact

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
_Decoder = Callable[[Json], object]
_PLAIN = (str, int, float, bool)


def encode(value: object) -> Json:
    """`value` as JSON values."""
    kind: type = type(value)
    if value is None or kind in _PLAIN:
        return cast(Json, value)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        tagged: dict[str, Json] = {"is": kind.__name__}
        for name in _names(kind):
            tagged[name] = encode(getattr(value, name))
        return tagged
    raise TypeError(f"cannot encode {kind.__name__}")


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def encode_fact(fact: Fact) -> Json:
    return encode(fact)


def decode_fact(data: Json) -> Fact:
    """The fact that `encode_fact` wrote.

    Raises:
        ValueError: not a fact of this version.
    """
    return cast(Fact, _decode(data, Fact))


def _decode(data: Json, kind: Any) -> object:
    return _decoder(kind)(data)


@cache
def _decoder(kind: Any) -> _Decoder:
    """What decodes values of an annotation; worked out once, for a journal has many."""
    origin = get_origin(kind)
    if origin is Union or origin is types.UnionType:
        return _union_decoder(get_args(kind))
    if origin is tuple:
        return _tuple_decoder(get_args(kind))
    kind = getattr(kind, "__supertype__", kind)  # NewType
    if kind in (str, int, float, bool):
        return partial(_decode_plain, kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return partial(_decode_enum, kind)
    if is_dataclass(kind):
        return _dataclass_decoder(kind)
    raise TypeError(f"cannot decode {kind}")


def _decode_plain(kind: type, data: Json) -> object:
    if isinstance(data, kind):
        return data
    if kind is float and isinstance(data, int):
        return float(data)
    raise ValueError(f"expected {kind.__name__}, found {data!r}")


def _decode_enum(kind: type[StrEnum], data: Json) -> object:
    return kind(str(data))


def _union_decoder(members: tuple[Any, ...]) -> _Decoder:
    rest = [member for member in members if member is not type(None)]
    optional = len(rest) < len(members)
    if len(rest) == 1:
        only = _decoder(rest[0])
        return lambda data: None if data is None else only(data)
    by_name = {member.__name__: _decoder(member) for member in rest}

    def decode(data: Json) -> object:
        if data is None and optional:
            return None
        if not isinstance(data, dict):
            raise ValueError(f"expected a tagged object, found {data!r}")
        member = by_name.get(str(data.get("is")))
        if member is None:
            raise ValueError(f"unknown kind {data.get('is')!r}")
        return member(data)

    return decode


def _tuple_decoder(items: tuple[Any, ...]) -> _Decoder:
    decoders = [_decoder(item) for item in items if item is not Ellipsis]
    repeats = items[-1:] == (Ellipsis,)

    def decode(data: Json) -> object:
        if not isinstance(data, list):
            raise ValueError(f"expected a list, found {data!r}")
        if repeats:
            return tuple(map(decoders[0], data))
        return tuple(decoder(item) for item, decoder in zip(data, decoders, strict=True))

    return decode


def _dataclass_decoder(kind: Any) -> _Decoder:
    hints = get_type_hints(kind)
    members = tuple(
        (
            item.name,
            _decoder(hints[item.name]),
            item.default is MISSING and item.default_factory is MISSING,
        )
        for item in fields(kind)
    )

    def decode(data: Json) -> object:
        if not isinstance(data, dict):
            raise ValueError(f"expected {kind.__name__}, found {data!r}")
        values = {}
        for name, decoder, required in members:
            if name in data:
                values[name] = decoder(data[name])
            elif required:
                raise ValueError(f"{kind.__name__}.{name} is missing")
        return kind(**values)

    return decode
