"""Records to and from plain JSON values, by their type annotations.

A union of dataclasses is tagged with the class name under "is". Missing fields take their
default, and fields of older versions are renamed, dropped or rewritten as `older_journals` says,
so that a newer controller can fold an older journal. Any other unknown field is an error: what it
says would be lost without a word.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from controller.core.changes import StateChange
from controller.core.incident_record import IncidentRecord
from controller.core.older_journals import UPGRADES, Json, with_names_of_now
from controller.core.packing import Rows, pack_rows, unpack_rows
from controller.core.records import JobPlan, JobRecord, NodeRecord, Size
from controller.core.written import RecordChanged, RecordKind
from outlast.failures import FailureClass

_Encoder = Callable[[Any], Json]
_Decoder = Callable[[Json], object]
_PLAIN = (str, int, float, bool)
_RECORDS: dict[RecordKind, type] = {
    RecordKind.JOB: JobRecord,
    RecordKind.NODE: NodeRecord,
    RecordKind.INCIDENT: IncidentRecord,
}
# Tables of a row for each node, which are alike.
_PACKED = ((JobPlan, "replica_node_indexes"), (Size, "replica_node_indexes"))


def encode_change(change: StateChange) -> Json:
    return _encode_record(change)


def decode_change(data: Json) -> StateChange:
    """The change that `encode_change` wrote.

    Raises:
        ValueError: not a change of this version.
    """
    return cast(StateChange, _decode(data, StateChange))


def _encode_record(value: object) -> Json:
    return _dataclass_encoder(cast(Any, type(value)))(value)


def _as_it_is(value: Json) -> Json:
    return value


@cache
def _encoder(kind: Any) -> _Encoder | None:
    """What encodes values of an annotation; None when they are JSON values as they are."""
    origin = get_origin(kind)
    if origin is Union or origin is types.UnionType:
        return _union_encoder(get_args(kind))
    if origin is tuple:
        return _tuple_encoder(get_args(kind))
    kind = getattr(kind, "__supertype__", kind)  # NewType
    if kind in _PLAIN or kind is type(None):
        return None
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _encode_enum
    if is_dataclass(kind):
        return _dataclass_encoder(cast(type, kind))
    raise TypeError(f"cannot encode {kind}")


def _encode_enum(value: StrEnum) -> Json:
    return value.value


def _encode_rows(value: Rows) -> Json:
    return {"runs": cast(Json, pack_rows(value))}


def _union_encoder(members: tuple[Any, ...]) -> _Encoder | None:
    encoders = [_encoder(member) for member in members]
    if not any(encoders):
        return None
    present = [member for member in members if member is not type(None)]
    if len(present) == 1:
        only = _encoder(present[0]) or _as_it_is
        return lambda value: None if value is None else only(value)
    return lambda value: None if value is None else _encode_record(value)


def _tuple_encoder(items: tuple[Any, ...]) -> _Encoder:
    encoders = [_encoder(item) for item in items if item is not Ellipsis]
    if not any(encoders):
        return list
    if items[-1:] == (Ellipsis,):
        each = encoders[0] or _as_it_is
        return lambda value: [each(item) for item in value]
    known = [encoder or _as_it_is for encoder in encoders]
    return lambda value: [encoder(item) for encoder, item in zip(known, value, strict=True)]


@cache
def _field_encoders(kind: Any) -> dict[str, _Encoder | None]:
    """What encodes each field of a record that is written."""
    hints = get_type_hints(kind)
    return {
        item.name: _encode_rows if (kind, item.name) in _PACKED else _encoder(hints[item.name])
        for item in fields(kind)
        if item.metadata.get("written", True)
    }


@cache
def _dataclass_encoder(kind: Any) -> _Encoder:
    if kind is RecordChanged:
        return _encode_changed
    members = tuple(_field_encoders(kind).items())
    tag = kind.__name__

    def encode_record(value: Any) -> Json:
        tagged: dict[str, Json] = {"is": tag}
        for name, encoder in members:
            own = getattr(value, name)
            tagged[name] = own if encoder is None else encoder(own)
        return tagged

    return encode_record


def _encode_changed(value: RecordChanged) -> Json:
    encoders = _field_encoders(_RECORDS[value.kind])
    values: dict[str, Json] = {}
    for name, new in value.values:
        encoder = encoders[name]
        values[name] = cast(Json, new) if encoder is None else encoder(new)
    return {"is": RecordChanged.__name__, value.kind.value: value.key, "values": values}


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
    try:
        return kind(str(data))
    except ValueError:
        if kind is FailureClass:
            # The journal of a version that has classes which this one has not.
            return FailureClass.UNKNOWN
        raise


def _decode_rows(data: Json) -> Rows:
    packed = data.get("runs") if isinstance(data, dict) else None
    if packed is None:
        # A version that wrote every row.
        return cast(Rows, _decode(data, Rows))
    return unpack_rows(cast(Rows, _decode(packed, Rows)))


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


def _exactly(kind: Any) -> type | None:
    """The one type whose values are decoded as they are, if it has one."""
    kind = getattr(kind, "__supertype__", kind)  # NewType
    return kind if kind in _PLAIN else None


def _decode_changed(data: Json) -> object:
    """No version wrote changes of records that need more than other names (`UPGRADES`)."""
    assert isinstance(data, dict)
    values = data.get("values")
    kind = next((each for each in RecordKind if each.value in data), None)
    if kind is None or not isinstance(values, dict):
        raise ValueError(f"expected a change of a record, found {data!r}")
    record = _RECORDS[kind]
    members = _members_by_name(record)
    decoded: list[tuple[str, object]] = []
    for name, value in with_names_of_now(record, values).items():
        if name not in members:
            raise _unknown(record, name)
        plain, decoder = members[name]
        decoded.append((name, value if type(value) is plain else decoder(value)))
    return RecordChanged(kind=kind, key=str(data[kind.value]), values=tuple(decoded))


@cache
def _members(kind: Any) -> tuple[tuple[str, type | None, _Decoder, bool], ...]:
    """Of each field of a record: its name, plain type and decoder, and whether it must be there."""
    hints = get_type_hints(kind)
    return tuple(
        (
            item.name,
            _exactly(hints[item.name]),
            _decode_rows if (kind, item.name) in _PACKED else _decoder(hints[item.name]),
            item.default is MISSING and item.default_factory is MISSING,
        )
        for item in fields(kind)
        if item.metadata.get("written", True)
    )


@cache
def _members_by_name(kind: Any) -> dict[str, tuple[type | None, _Decoder]]:
    return {name: (plain, decoder) for name, plain, decoder, _ in _members(kind)}


def _dataclass_decoder(kind: Any) -> _Decoder:
    if kind is RecordChanged:
        return _decode_changed
    members = _members(kind)
    names = {"is", *(name for name, *_ in members)}
    upgrade = UPGRADES.get(kind)

    def decode(data: Json) -> object:
        if not isinstance(data, dict):
            raise ValueError(f"expected {kind.__name__}, found {data!r}")
        data = data if upgrade is None else upgrade(data)
        if not data.keys() <= names:
            data = with_names_of_now(kind, data)
            for name in data.keys() - names:
                raise _unknown(kind, name)
        values = {}
        for name, plain, decoder, required in members:
            if name in data:
                value = data[name]
                values[name] = value if type(value) is plain else decoder(value)
            elif required:
                raise ValueError(f"{kind.__name__}.{name} is missing")
        return kind(**values)

    return decode


def _unknown(kind: Any, name: str) -> ValueError:
    return ValueError(
        f"{kind.__name__}.{name} is no field that this version knows; start the version of Outlast "
        "that wrote it"
    )
