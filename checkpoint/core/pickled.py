"""Writes a pickle of objects whose classes are not here.

What is written is a tree of these few forms, opcode by opcode, in protocol 2, which
every Python reads. Nothing is shared between branches.

What does not belong here: what the objects mean (`checkpoint/torch_format/dcp.py`), and reading.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, Union


@dataclass(frozen=True, slots=True)
class Global:
    """Something that has a name in a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Called:
    """What a function gives."""

    function: Global
    arguments: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class, and its state: its fields, or what its `__setstate__` takes."""

    kind: Global
    state: Value


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dictionary."""

    items: tuple[tuple[Value, Value], ...]


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Value, ...]


Value: TypeAlias = Union[
    Global, Called, Instance, Pairs, Items, str, int, bool, "tuple[Value, ...]", None
]


def dumps(value: Value) -> bytes:
    """The pickle of a tree."""
    return b"".join((pickle.PROTO + b"\x02", *_opcodes(value), pickle.STOP))


def fields(**values: Value) -> Pairs:
    """The state of an object that has these attributes."""
    return Pairs(tuple(values.items()))


def _opcodes(value: Value) -> Iterable[bytes]:
    match value:
        case None:
            yield pickle.NONE
        case bool():
            yield pickle.NEWTRUE if value else pickle.NEWFALSE
        case int():
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            yield pickle.LONG1 + bytes((len(raw),)) + raw
        case str():
            raw = value.encode()
            yield pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw
        case tuple():
            yield from _marked(value, pickle.TUPLE)
        case Items(items):
            yield pickle.EMPTY_LIST
            yield from _marked(items, pickle.APPENDS)
        case Pairs(items):
            yield pickle.EMPTY_DICT
            yield from _marked((half for pair in items for half in pair), pickle.SETITEMS)
        case Global(module, name):
            yield pickle.GLOBAL + f"{module}\n{name}\n".encode()
        case Called(function, arguments):
            yield from _opcodes(function)
            yield from _opcodes(arguments)
            yield pickle.REDUCE
        case Instance(kind, state):
            yield from _opcodes(kind)
            yield pickle.EMPTY_TUPLE + pickle.NEWOBJ
            yield from _opcodes(state)
            yield pickle.BUILD


def _marked(values: Iterable[Value], end: bytes) -> Iterable[bytes]:
    yield pickle.MARK
    for value in values:
        yield from _opcodes(value)
    yield end
