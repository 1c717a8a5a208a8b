"""JSON records that notice any damage to themselves.

A record is canonical JSON with the SHA-256 of everything else inside. Reading
demands the very bytes that writing would give, so that any flipped, missing or
added byte is found, in a string's text as in a brace.

A newer major format is refused; unknown fields of a newer minor are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TypeVar

FORMAT_MAJOR = 1
FORMAT_MINOR = 0

_Record = TypeVar("_Record")


class RecordError(ValueError):
    """A record that is damaged, incomplete or of a format we do not read."""


def canonical(value: object) -> bytes:
    """The one JSON text of `value`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256(raw: bytes) -> str:
    """Digest of a whole record, for another record to name it by."""
    return hashlib.sha256(raw).hexdigest()


def encode_checked(fields: Mapping[str, object]) -> bytes:
    """The record's bytes, with format and digest added."""
    body = {**fields, "format": {"major": FORMAT_MAJOR, "minor": FORMAT_MINOR}}
    return canonical({**body, "sha256": sha256(canonical(body))})


def decode_checked(raw: bytes) -> Fields:
    """The fields of a record that `encode_checked` wrote.

    Raises:
        RecordError: a byte is not what it was, or the format is newer than ours.
    """
    try:
        document: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from error
    fields = Fields(document)
    digest = fields.text("sha256")
    body = fields.without("sha256")
    if canonical(document) != raw or sha256(canonical(body)) != digest:
        raise RecordError("its digest does not fit its content")
    major = fields.inner("format").integer("major")
    if major > FORMAT_MAJOR:
        raise RecordError(
            f"format {major}, written by a newer Outlast; this one reads up to {FORMAT_MAJOR}"
        )
    return fields


def checked(make: Callable[[], _Record]) -> _Record:
    """A record built from parsed fields, which may contradict each other."""
    try:
        return make()
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error)) from error


class Fields:
    """A JSON object whose fields are fetched by the type they must have."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise RecordError(f"a {type(value).__name__} where an object belongs")
        self._fields: dict[str, object] = value

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def integer(self, name: str) -> int:
        """A whole number that is not negative."""
        return _count(name, self._get(name))

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise RecordError(f"{name} is {value!r}, not text")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(_count(name, value) for value in self._list(name))

    def inner(self, name: str) -> Fields:
        return Fields(self._get(name))

    def inners(self, name: str) -> tuple[Fields, ...]:
        return tuple(Fields(value) for value in self._list(name))

    def without(self, name: str) -> dict[str, object]:
        """All fields but one."""
        return {key: value for key, value in self._fields.items() if key != name}

    def _list(self, name: str) -> list[object]:
        value = self._get(name)
        if not isinstance(value, list):
            raise RecordError(f"{name} is {value!r}, not a list")
        return value

    def _get(self, name: str) -> object:
        if name not in self._fields:
            raise RecordError(f"{name} is missing")
        return self._fields[name]


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RecordError(f"{name} is {value!r}, not a count")
    return value
