"""A job spec as the message in which a client sends it."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import json_format, struct_pb2

from outlast.problems import FieldProblem, SpecError
from outlast.spec.parse import read_spec
from outlast.submission import resolve_places

# Beyond this a double, which is what a Struct holds, drops digits.
_LARGEST_EXACT = 2**53


def spec_message(document: object) -> struct_pb2.Struct:
    """The document with its relative paths below the current folder, ready to be sent.

    Raises:
        SpecError: with every problem of a document that cannot be sent.
    """
    if not isinstance(document, dict):
        # Why it is none is said in the same words everywhere.
        raise SpecError(tuple(read_spec(document)[1]))
    return struct_of(resolve_places(document, Path.cwd())[0])


def struct_of(document: dict[str, object]) -> struct_pb2.Struct:
    """The document as it is.

    Raises:
        SpecError: with every problem of a document that cannot be sent.
    """
    struct = struct_pb2.Struct()
    try:
        json_format.ParseDict(_doubles(document), struct)
    except json_format.ParseError as error:
        _, problems = read_spec(document)
        not_sent = FieldProblem(field="(document)", message=f"cannot be sent: {error}")
        raise SpecError(tuple(problems) or (not_sent,)) from error
    return struct


def _doubles(value: object) -> object:
    """Integers that a double cannot hold become text, which the spec's parser reads too."""
    if isinstance(value, dict):
        return {str(key): _doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_doubles(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST_EXACT:
        return str(value)
    return value
