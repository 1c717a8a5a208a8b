"""The routes of the JSON API that are more than one call, or none: what each takes and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor

from controller.web.columns import PARTS
from controller.web.routes import ROOT
from outlast.trace.heat import Alike, Measure, Order
from outlast.v1 import common_pb2, diagnostics_pb2, jobs_pb2, ranks_pb2

Schema = dict[str, Any]

REF = "#/components/schemas/"
_INTEGER: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}


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


def message(kind: Descriptor) -> Schema:
    """A reference to the schema of a message."""
    return {"$ref": REF + kind.name}


JOB, REPORT = jobs_pb2.Job.DESCRIPTOR, common_pb2.StepReport.DESCRIPTOR
_NUMBERS: Schema = {"type": "array", "items": {"type": ["number", "null"]}}
_LAYOUT = _object(**dict.fromkeys(("tp", "pp", "dp", "ep", "cp"), _INTEGER))
_SPEC: Schema = {"type": "object", "description": f"A job spec: see {ROOT}/spec-schema."}
_TEXT: Schema = {**STRING, "description": "A job spec as YAML or JSON, instead of `spec`."}
PLAN = _object(
    name=STRING,
    layout=_LAYOUT,
    **dict.fromkeys(
        (
            *("num_ranks", "nodes", "workers_per_node", "parameters", "tokens_per_step"),
            *("total_tokens", "num_micro_batches", "node_host_memory_bytes", "standbys"),
        ),
        _INTEGER,
    ),
    **dict.fromkeys(("flops_per_token", "total_flops", "bubble"), _NUMBER),
    stages={
        "type": "array",
        "items": _object(
            **dict.fromkeys(
                (
                    *("stage", "parameters", "weights_bytes", "gradients_bytes"),
                    *("optimizer_bytes", "activations_bytes", "buffers_bytes", "working_bytes"),
                    *("host_slots_bytes", "host_memory_bytes", "host_slot_bytes"),
                    "host_activations_bytes",
                    *("device_bytes", "in_flight"),
                ),
                _INTEGER,
            )
        ),
    },
    communication=_object(
        **dict.fromkeys(
            (
                *("tp_bytes", "pp_bytes", "dp_bytes", "cp_bytes", "ep_bytes"),
                *("embedding_bytes", "total_bytes"),
            ),
            _INTEGER,
        )
    ),
    projection={
        "anyOf": [
            _object(
                device=STRING,
                source=STRING,
                memory_bytes={"type": ["integer", "null"]},
                **dict.fromkeys(
                    (
                        *("peak_flops_per_s", "kernel_share", "link_bytes_per_s", "latency_s"),
                        *("step_s", "compute_s", "bubble_s", "tp_exposed_s", "pp_exposed_s"),
                        *("dp_exposed_s", "tokens_per_s", "mfu_full", "mfu_windowed"),
                        *("recompute_s", "hfu_full", "hfu_windowed"),
                        *("tp_bytes_per_s", "pp_bytes_per_s", "dp_bytes_per_s"),
                        *("cp_bytes_per_s", "ep_bytes_per_s"),
                    ),
                    _NUMBER,
                ),
            ),
            {"type": "null"},
        ]
    },
    warnings={"type": "array", "items": STRING},
)
_ATTEMPT: Schema = {**_INTEGER, "description": "0: the newest; those before while they are kept."}
_LOGS: dict[str, Schema] = {
    "rank": _INTEGER,
    "attempt": {
        "oneOf": [_INTEGER, {"enum": ["all"]}],
        "description": "0: the newest; all: every attempt that is kept.",
    },
    "tail_bytes": _INTEGER,
    "since_s": {"type": "number", "description": "Written since then, by the Unix epoch."},
    "grep": {**STRING, "description": "A regular expression that lines match."},
}
_COLUMNS = (
    *("step", "attempt", "loss", "grad_norm", "learning_rate"),
    *("tokens_per_s", "duration_s", "at_s", "eval_loss", *PARTS),
)
_CURVE: Schema = {
    **_object(**dict.fromkeys(_COLUMNS, _NUMBERS)),
    "patternProperties": {"^eval/.+/loss$": _NUMBERS},
}
OWN = (
    Own(
        verb="POST",
        path="/login",
        what="Have this browser show a token from now on, in a cookie that no script reads.",
        body=_object(token=STRING),
        answer=_object(name=STRING, role=STRING, asked={"type": "boolean"}),
    ),
    Own(
        verb="POST",
        path="/logout",
        what="Have this browser forget the token.",
        body={"type": "object", "properties": {}, "additionalProperties": False},
        answer=_object(),
    ),
    Own(
        verb="GET",
        path="/about",
        what="Version, term, and why the controller is read-only, empty when it is not.",
        answer=_object(version=STRING, term=_INTEGER, read_only=STRING),
    ),
    Own(verb="GET", path="/spec-schema", what="JSON Schema of a job spec.", answer={}),
    Own(verb="GET", path="/openapi.json", what="This document.", answer={}),
    Own(
        verb="GET",
        path="/jobs",
        what="Jobs without spec and nodes, newest first: `limit` of those after the job `after`.",
        parameters={"limit": _INTEGER, "after": STRING},
        answer=_object(
            jobs={"type": "array", "items": message(JOB)}, next={"type": ["string", "null"]}
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
                "request_id": STRING,
                "wait_for_nodes": {"type": "boolean"},
            },
        },
        answer=_object(job=message(JOB)),
        status=201,
    ),
    Own(
        verb="POST",
        path="/jobs/check",
        what="How a job would fit the connected nodes. It starts nothing.",
        body={"type": "object", "properties": {"spec": _SPEC, "text": _TEXT}},
        answer=message(jobs_pb2.CheckFitResponse.DESCRIPTOR),
    ),
    Own(
        verb="POST",
        path="/jobs/plan",
        what="What a job will need, as `outlast plan` says it: memory of a rank of each stage, "
        "traffic, bubble, warnings, and with a `device` (one of `devices`, or its peak in FLOP/s) "
        "the projected time of a step; `link` is what one rank sends over the network in a second "
        "(25GB/s), `latency_us` what a message takes besides, in microseconds (20), `kernels` the "
        "share of its peak that matrix products reach (0.7). Null, with the `reason`, for a "
        "script. It starts nothing.",
        body={
            "type": "object",
            "properties": {
                "spec": _SPEC,
                "text": _TEXT,
                "device": STRING,
                "link": STRING,
                "latency_us": _NUMBER,
                "kernels": _NUMBER,
            },
        },
        answer=_object(
            plan={"anyOf": [PLAN, {"type": "null"}]},
            reason=STRING,
            devices={"type": "array", "items": STRING},
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/curve",
        what="The curve from one step to another as columns, thinned to about `points` rows (1,500 "
        "by default, up to 20,000) that show every spike of the loss, and half as many evaluated "
        "ones that show those of the held-out loss; without steps that a restart gave up and that "
        "are not redone yet, which num_steps counts. Values have six significant digits. The parts "
        "of a step are a mean over the ranks of rank 0's node, in seconds, and null where they are "
        "not known. Held-out sets that have names have columns eval/NAME/loss besides; eval_loss "
        "is their mean.",
        parameters={"points": _INTEGER, "from": _INTEGER, "to": _INTEGER},
        answer=_object(num_steps=_INTEGER, columns=_CURVE),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/events",
        what="Follow a job: events `job` (without spec and nodes while they have not changed), "
        "`steps`, `failed` with an error, and `end`.",
        parameters={"after_step": _INTEGER},
        answer={"anyOf": [message(JOB), {"type": "array", "items": message(REPORT)}]},
        is_stream=True,
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/heat-map",
        what="How long each rank took for the newest `steps`: the whole step, its own `work`, "
        "`waiting` for other ranks, or a phase or pass without waiting; and `percents` of the "
        "median of its peers: ranks of the job that have what `alike` lists in common, the "
        "pipeline stage or the experts. Rows are ordered by rank, by node, or by position "
        "(replica, stage, tensor shard). Where there are more ranks than `rows`, a row has several "
        "`ranks`, and of each step the one that is furthest above its peers; `slowest` is furthest "
        "above on the mean. `outliers` are runs of steps, by the index of the first and their "
        "number, in which a rank of the row took 1.15 times its peers or more, and was further "
        "above them than noise is. A time is null where the rank's black box does not have it any "
        "more. With `ranks` a larger job's map has about so many, of one node in `node_stride`, "
        "measured against each other, and is there sooner; it has more where a rank would have "
        "peers on fewer than three nodes.",
        parameters={
            "measure": {"enum": [str(each) for each in Measure]},
            "order": {"enum": [str(each) for each in Order]},
            "rows": _INTEGER,
            **dict.fromkeys(("steps", "ranks"), _INTEGER),
            "attempt": _ATTEMPT,
        },
        answer=_object(
            **dict.fromkeys(("attempt", "newest_attempt", "num_ranks", "node_stride"), _INTEGER),
            measure=STRING,
            order=STRING,
            layout=_LAYOUT,
            alike={"type": "array", "items": {"enum": [str(each) for each in Alike]}},
            steps={"type": "array", "items": _INTEGER},
            rows={
                "type": "array",
                "items": _object(
                    first=_INTEGER,
                    last=_INTEGER,
                    ranks={"type": "array", "items": _INTEGER},
                    node=STRING,
                    pp={"type": ["integer", "null"]},
                    slowest=_INTEGER,
                    mean_ratio=_NUMBER,
                    outliers={
                        "type": "array",
                        "items": {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2},
                    },
                    seconds=_NUMBERS,
                    percents={"type": "array", "items": {"type": ["integer", "null"]}},
                ),
            },
            missing={"type": "array", "items": _object(node=STRING, reason=STRING)},
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/timeline",
        what="What up to `most` ranks from `first` on did in a step, by one clock; by default in "
        "the newest that all of them have done. `steps` are those that are still known. Of a "
        "track `bubble_s` is what it stood still for other stages of the pipeline, `exposed_s` for "
        "other ranks and transfers, and `hidden_s` what was under way while it computed, at most.",
        parameters={
            "step": _INTEGER,
            "first": _INTEGER,
            "most": _INTEGER,
            "attempt": _ATTEMPT,
        },
        answer=_object(
            attempt=_INTEGER,
            newest_attempt=_INTEGER,
            num_ranks=_INTEGER,
            layout=_LAYOUT,
            steps={"type": "array", "items": _INTEGER},
            missing={"type": "array", "items": _object(node=STRING, reason=STRING)},
            step=_INTEGER,
            begun_at_s=_NUMBER,
            length_s=_NUMBER,
            clocks_apart_s=_NUMBER,
            tracks={
                "type": "array",
                "items": _object(
                    rank=_INTEGER,
                    node=STRING,
                    pp={"type": ["integer", "null"]},
                    **dict.fromkeys(("step_s", "bubble_s", "exposed_s", "hidden_s"), _NUMBER),
                    bars={
                        "type": "array",
                        "items": _object(
                            name=STRING,
                            begun_s=_NUMBER,
                            ended_s=_NUMBER,
                            group=STRING,
                            sequence=_INTEGER,
                            detail={"type": "integer"},
                            chunk=_INTEGER,
                            is_over={"type": "boolean"},
                            last={"type": ["integer", "null"]},
                            **dict.fromkeys(("waited_s", "bubble_s", "hidden_s"), _NUMBER),
                            peer={"type": ["integer", "null"]},
                            message={"type": ["integer", "null"]},
                            departed_s={"type": ["number", "null"]},
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
            ranks={"type": "array", "items": message(ranks_pb2.ReadStacksResponse.DESCRIPTOR)}
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/profile",
        what="Where a rank is in the next `seconds`: the share of its main thread's time that each "
        "function itself has, and the recording as a document of speedscope. `beside` records "
        "another rank at the same time: its number, or `peer` for one of another replica that does "
        "the same and takes the median time.",
        parameters={"rank": _INTEGER, "seconds": _INTEGER, "beside": STRING},
        answer=_object(
            node=STRING,
            attempt=_INTEGER,
            beside={
                "anyOf": [_object(rank=_INTEGER, node=STRING, problem=STRING), {"type": "null"}]
            },
            functions={
                "type": "array",
                "items": _object(
                    name=STRING,
                    file=STRING,
                    share=_NUMBER,
                    beside_share={"type": ["number", "null"]},
                ),
            },
            speedscope={"type": "object"},
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/logs",
        what="The last `tail_bytes` of the output of each rank, or of one, with times. "
        "With `since_s` or `grep`: of whole logs, 16 MiB of each at most.",
        parameters=_LOGS,
        answer=_object(
            chunks={"type": "array", "items": message(jobs_pb2.LogsResponse.DESCRIPTOR)}
        ),
    ),
    Own(
        verb="GET",
        path="/jobs/{job_id}/logs/events",
        what="Follow the output: events `chunk`, `failed` with an error, and `end`.",
        parameters=_LOGS,
        answer=message(jobs_pb2.LogsResponse.DESCRIPTOR),
        is_stream=True,
    ),
    Own(
        verb="GET",
        path="/diagnostics/{run_id}/events",
        what="Follow a run of diagnostics: events `progress`, the last of them with the run's "
        "report, `failed` with an error, and `end`. Only runs of this controller, of those that "
        "ended the last 16, are followed.",
        answer=message(diagnostics_pb2.WatchDiagnosticsResponse.DESCRIPTOR),
        is_stream=True,
    ),
)
