"""What the JSON API is, as OpenAPI 3.1: from the routes, and from the messages of the protos."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

import outlast
from controller.web.messages import STRUCT, is_map, name_of
from controller.web.own_routes import JOB, OWN, REF, REPORT, STRING, Schema, message
from controller.web.routes import CALLS, ROOT, Call
from outlast.v1 import diagnostics_pb2, jobs_pb2, ranks_pb2

_TYPES = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
    FieldDescriptor.CPPTYPE_UINT32: "integer",
    FieldDescriptor.CPPTYPE_UINT64: "integer",
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "reason", "fields"],
            "properties": {
                "message": STRING,
                "reason": {**STRING, "description": "A constant, for programs."},
                "fields": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["field", "description"],
                        "properties": {"field": STRING, "description": STRING},
                    },
                },
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The whole document."""
    schemas: dict[str, Schema] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for own in OWN:
        operation = _operation(own.path, own.what, own.parameters, own.body, own.answer, own.status)
        if own.is_stream:
            content = operation["responses"][str(own.status)]["content"]
            content["text/event-stream"] = content.pop("application/json")
        paths.setdefault(ROOT + own.path, {})[own.verb.lower()] = operation
    for kind in (JOB, REPORT, *_answers()):
        _add(schemas, kind)
    for call in CALLS:
        paths.setdefault(ROOT + call.path, {})[call.verb.lower()] = _of_call(call, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outlast",
            "version": outlast.__version__,
            "description": "The controller's JSON API. Fields are those of the messages in "
            "proto/outlast/v1; what is absent, NaN or Inf is null.",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def _answers() -> tuple[Descriptor, ...]:
    return (
        jobs_pb2.CheckFitResponse.DESCRIPTOR,
        jobs_pb2.LogsResponse.DESCRIPTOR,
        ranks_pb2.ReadStacksResponse.DESCRIPTOR,
        diagnostics_pb2.WatchDiagnosticsResponse.DESCRIPTOR,
    )


def _of_call(call: Call, schemas: dict[str, Schema]) -> dict[str, Any]:
    asked = call.method.input_type
    parameters = {
        name: _one(asked.fields_by_name[field]) for name, field in call.parameters.items()
    }
    body = None
    if call.verb != "GET":
        given = set(_path_names(call.path))
        fields = [each for each in asked.fields if each.name not in given]
        for each in fields:
            if each.message_type is not None:
                _add(schemas, each.message_type)
        body = {
            "type": "object",
            "properties": {each.name: _schema(each) for each in fields},
            "additionalProperties": False,
        }
    _add(schemas, call.method.output_type)
    answer = message(call.method.output_type)
    return _operation(call.path, call.what, parameters, body, answer, 200)


def _operation(
    path: str,
    what: str,
    parameters: Mapping[str, Schema],
    body: Schema | None,
    answer: Schema,
    status: int,
) -> dict[str, Any]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": STRING}
        for name in _path_names(path)
    ]
    in_query = [{"name": name, "in": "query", "schema": each} for name, each in parameters.items()]
    operation: dict[str, Any] = {
        "summary": what,
        "parameters": [*in_path, *in_query],
        "responses": {
            str(status): {
                "description": "Done.",
                "content": {"application/json": {"schema": answer}},
            },
            "default": {
                "description": "Refused.",
                "content": {"application/json": {"schema": {"$ref": REF + "Error"}}},
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return operation


def _path_names(path: str) -> list[str]:
    return re.findall(r"{(\w+)}", path)


def _add(schemas: dict[str, Schema], kind: Descriptor) -> None:
    """A message, and those in it."""
    if kind.full_name == STRUCT or kind.name in schemas:
        return
    schemas[kind.name] = {}
    for each in kind.fields:
        if each.message_type is not None and not is_map(each):
            _add(schemas, each.message_type)
    # The list of jobs, and brief ones, leave out what is large.
    optional = ("spec", "nodes") if kind is JOB else ()
    schemas[kind.name] = {
        "type": "object",
        "required": [name_of(each) for each in kind.fields if each.name not in optional],
        "properties": {name_of(each): _schema(each) for each in kind.fields},
    }


def _schema(field: FieldDescriptor) -> Schema:
    if is_map(field):
        return {
            "type": "object",
            "additionalProperties": _one(field.message_type.fields_by_name["value"]),
        }
    one = _one(field)
    if field.label == FieldDescriptor.LABEL_REPEATED:
        return {"type": "array", "items": one}
    if not field.has_presence:
        return one
    kind = one.get("type")
    return {"anyOf": [one, {"type": "null"}]} if kind is None else {**one, "type": _nullable(kind)}


def _nullable(kind: str | list[str]) -> list[str]:
    return [*({kind} if isinstance(kind, str) else set(kind) - {"null"}), "null"]


def _one(field: FieldDescriptor) -> Schema:
    if field.message_type is None:
        # NaN and Inf are no numbers in JSON.
        return {"type": _TYPES.get(field.cpp_type, ["number", "null"])}
    return (
        {"type": "object"}
        if field.message_type.full_name == STRUCT
        else message(field.message_type)
    )
