"""What the JSON API is, as OpenAPI 3.1: from the routes, and from the messages of the protos."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

import outlast
from controller.web.messages import STRUCT, is_map, name_of
from controller.web.routes import CALLS, ROOT, Call
from outlast.trace.heat import Measure
from outlast.v1 import common_pb2, jobs_pb2, ranks_pb2

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_TYPES = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
    FieldDescriptor.CPPTYPE_UINT32: "integer",
    FieldDescriptor.CPPTYPE_UINT64: "integer",
}
_INTEGER: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_STRING: Schema = {"type": "string"}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "reason", "fields"],
            "properties": {
                "message": _STRING,
                "reason": {**_STRING, "description": "A constant, for programs."},
                "fields": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["field", "description"],
                        "properties": {"field": _STRING, "description": _STRING},
                    },
                },
            },
        }
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A route that is more than one call, or none."""

    verb: str
    path: str
    what: str
    answer: Schema
    parameters: Mapping[str, Schema] = field(default_factory=dict)
    body: Schema | None = None
    is_stream: bool = False
    status: int = 200


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _message(kind: Descriptor) -> Schema:
    return {"$ref": _REF + kind.name}


_JOB, _REPORT = jobs_pb2.Job.DESCRIPTOR, common_pb2.StepReport.DESCRIPTOR
_NUMBERS: Schema = {"type": "array", "items": {"type": ["number", "null"]}}
_SPEC: Schema = {"type": "object", "description": f"A job spec: see {ROOT}/spec-schema."}
_TEXT: Schema = {**_STRING, "description": "A job spec as YAML or JSON, instead of `spec`."}
_LOGS = {"rank": _INTEGER, "attempt": _INTEGER, "tail_bytes": _INTEGER}
_COLUMNS = (
    *("step", "attempt", "loss", "grad_norm", "learning_rate"),
    *("tokens_per_s", "duration_s", "at_s", "eval_loss"),
)
OWN = (
    Own(
        verb="GET",
        path="/about",
        what="Version, term, and why the controller is read-only, empty when it is not.",
        answer=_object(version=_STRING, term=_INTEGER, read_only=_STRING),
    ),
    Own(verb="GET", path="/spec-schema", what="JSON Schema of a job spec.", answer={}),
    Own(verb="GET", path="/openapi.json", what="This document.", answer={}),
    Own(
        verb="GET",
        path="/jobs",
        what="Jobs without spec and nodes, newest first: `limit` of those after the job `after`.",
        parameters={"limit": _INTEGER, "after": _STRING},
        answer=_object(
            jobs={"type": "array", "items": _message(_JOB)}, next={"type": ["string", "null"]}
        ),
    ),
    Own(
        verb="POST",
        path="/jobs",
        what="Submit a job; the same `request_id` again answers the job already made.",
        body={
            "type": "object",
            "properties": {
                "spec": _SPEC,
                "text": _TEXT,
                "request_id": _STRING,
                "wait_for_nodes": {"type": "boolean"},
            },
        },
        answer=_object(job=_message(_JOB)),
        status=201,
    ),
    Own(
        verb="POST",
        path="/jobs/check",
        what="How a job would fit the connected nodes. It starts nothing.",
        body={"type": "object", "properties": {"spec": _SPEC, "text": _TEXT}},
        answer=_message(jobs_pb2.CheckFitResponse.DESCRIPTOR),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/curve",
        what="The curve from one step to another as columns, thinned to about `points` rows that "
        "show every spike of the loss.",
        parameters={"points": _INTEGER, "from": _INTEGER, "to": _INTEGER},
        answer=_object(num_steps=_INTEGER, columns=_object(**dict.fromkeys(_COLUMNS, _NUMBERS))),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/events",
        what="Follow a job: events `job` (without spec and nodes while they have not changed), "
        "`steps`, `failed` with an error, and `end`.",
        parameters={"after_step": _INTEGER},
        answer={"anyOf": [_message(_JOB), {"type": "array", "items": _message(_REPORT)}]},
        is_stream=True,
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/heat-map",
        what="How long each rank took for the newest `steps`: the whole step, its own `work`, "
        "`waiting` for other ranks, or a phase or pass without waiting. Where there are more ranks "
        "than `rows`, a row has the longest time of several. A time is null where the rank's "
        "black box does not have it any more.",
        parameters={
            "measure": {"enum": [str(each) for each in Measure]},
            "rows": _INTEGER,
            "steps": _INTEGER,
        },
        answer=_object(
            attempt=_INTEGER,
            measure=_STRING,
            num_ranks=_INTEGER,
            steps={"type": "array", "items": _INTEGER},
            rows={
                "type": "array",
                "items": _object(
                    first=_INTEGER,
                    last=_INTEGER,
                    node=_STRING,
                    pp={"type": ["integer", "null"]},
                    seconds=_NUMBERS,
                ),
            },
            missing={"type": "array", "items": _object(node=_STRING, reason=_STRING)},
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/timeline",
        what="What up to `most` ranks from `first` on did in a step, by one clock; by default in "
        "the newest that all of them have done. `steps` are those that are still known.",
        parameters={"step": _INTEGER, "first": _INTEGER, "most": _INTEGER},
        answer=_object(
            attempt=_INTEGER,
            num_ranks=_INTEGER,
            layout=_object(**dict.fromkeys(("tp", "pp", "dp", "ep"), _INTEGER)),
            steps={"type": "array", "items": _INTEGER},
            missing={"type": "array", "items": _object(node=_STRING, reason=_STRING)},
            step=_INTEGER,
            begun_at_s=_NUMBER,
            length_s=_NUMBER,
            clocks_apart_s=_NUMBER,
            tracks={
                "type": "array",
                "items": _object(
                    rank=_INTEGER,
                    node=_STRING,
                    pp={"type": ["integer", "null"]},
                    bars={
                        "type": "array",
                        "items": _object(
                            name=_STRING,
                            begun_s=_NUMBER,
                            ended_s=_NUMBER,
                            group=_STRING,
                            sequence=_INTEGER,
                            detail={"type": "integer"},
                            chunk=_INTEGER,
                            is_over={"type": "boolean"},
                            last={"type": ["integer", "null"]},
                            waited_s=_NUMBER,
                        ),
                    },
                ),
            },
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/stacks",
        what="Where each rank that runs stands now, or one.",
        parameters={"rank": _INTEGER},
        answer=_object(
            ranks={"type": "array", "items": _message(ranks_pb2.ReadStacksResponse.DESCRIPTOR)}
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/profile",
        what="Where a rank is in the next `seconds`: the share of its main thread's time that each "
        "function itself has, and the recording as a document of speedscope.",
        parameters={"rank": _INTEGER, "seconds": _INTEGER},
        answer=_object(
            node=_STRING,
            attempt=_INTEGER,
            functions={
                "type": "array",
                "items": _object(name=_STRING, file=_STRING, share=_NUMBER),
            },
            speedscope={"type": "object"},
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/logs",
        what="The last `tail_bytes` of the output of each rank, or of one.",
        parameters=_LOGS,
        answer=_object(
            chunks={"type": "array", "items": _message(jobs_pb2.LogsResponse.DESCRIPTOR)}
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/logs/events",
        what="Follow the output: events `chunk`, `failed` with an error, and `end`.",
        parameters=_LOGS,
        answer=_message(jobs_pb2.LogsResponse.DESCRIPTOR),
        is_stream=True,
    ),
)


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
    for kind in (_JOB, _REPORT, *_answers()):
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
    answer = _message(call.method.output_type)
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
        {"name": name, "in": "path", "required": True, "schema": _STRING}
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
                "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}},
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
    optional = ("spec", "nodes") if kind is _JOB else ()
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
        else _message(field.message_type)
    )
