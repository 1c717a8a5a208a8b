"""A request's spec, read and planned off the event loop: heartbeats are handled meanwhile.

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
from outlast.problems import SpecError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

# A client waits for 30 s.
PLAN_S = 20.0


async def planned(document: struct_pb2.Struct, context: Context) -> tuple[JobSpec, JobPlan]:
    """The spec of a request and the plan of its job; a spec that is wrong ends the call."""
    try:
        async with asyncio.timeout(PLAN_S):
            return await asyncio.to_thread(_read, document)
    except SpecError as error:
        await bad_request(context, error)
    except TimeoutError:
        await abort(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the job's plan took longer than {PLAN_S:g} s; the controller is overloaded, submit "
            "again later",
            reason="PLAN_TOO_SLOW",
        )


def _read(document: struct_pb2.Struct) -> tuple[JobSpec, JobPlan]:
    spec = parse_spec(document_of(document))
    return spec, plan_of(spec)
