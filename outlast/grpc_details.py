"""What gRPC's status of a failed call says in detail: problems of fields, and a reason."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outlast.problems import FieldProblem


def details(error: grpc.RpcError) -> tuple[tuple[FieldProblem, ...], str]:
    """Field problems and the reason out of an error's details."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # a failed call is its error
    problems: list[FieldProblem] = []
    reason = ""
    for detail in status.details if status is not None else ():
        request = error_details_pb2.BadRequest()
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(request):
            problems.extend(
                FieldProblem(field=violation.field, message=violation.description)
                for violation in request.field_violations
            )
        elif detail.Unpack(info):
            reason = info.reason
    return tuple(problems), reason
