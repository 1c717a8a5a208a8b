"""A request's spec and the plan of its job, made while heartbeats are handled.

The plan of an elastic job with 100,000 ranks says for each of its sizes where copies of host
memory go, which is half a second of work.
"""

from __future__ import annotations

import asyncio

import grpc
from google.protobuf import struct_pb2

from controller.convert import plan_of
from controller.core.records import JobPlan
from controller.grpc_errors import Context, abort, bad_request
from controller.rpc.views import document_of
from controller.store.code import CodeStore
from outlast.problems import FieldProblem, SpecError, shown
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

# A client waits for 30 s.
PLAN_S = 20.0


async def parsed(document: struct_pb2.Struct, context: Context) -> JobSpec:
    """The spec of a request; one that is wrong ends the call."""
    try:
        return parse_spec(document_of(document))
    except SpecError as error:
        await bad_request(context, error)


async def planned(spec: JobSpec, context: Context, code: CodeStore | None = None) -> JobPlan:
    """The plan of a job; one that takes too long ends the call, and one without its `code`."""
    if code is not None and spec.workload.code.is_given:
        await _check_code(spec, context, code)
    try:
        async with asyncio.timeout(PLAN_S):
            return await asyncio.to_thread(plan_of, spec)
    except SpecError as error:
        await bad_request(context, error)
    except TimeoutError:
        await abort(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the job's plan took longer than {PLAN_S:g} s; the controller is overloaded, try "
            "again later",
            reason="PLAN_TOO_SLOW",
        )


async def _check_code(spec: JobSpec, context: Context, code: CodeStore) -> None:
    """Have the code of a job stay until it is submitted; one that is not here ends the call."""
    digest, field = spec.workload.code.digest, "workload.code.digest"
    if digest is None:
        message = (
            "is required with workload.code.path: `outlast submit` and outlast.client send the "
            "folder and fill it in"
        )
    elif await asyncio.to_thread(code.find, digest):
        return
    else:
        message = (
            f"is {shown(digest)}, and this controller has no such code; submit the folder, "
            "workload.code.path without a digest"
        )
    await bad_request(context, SpecError((FieldProblem(field=field, message=message),)))
