"""What gRPC's status of a failed call says in detail: problems of fields, and a reason."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outlast.problems import FieldProblem
from outlast.v1.access_pb2 import LoginIssuer

# The reason with which a stream ends whose caller is not known any more: another call shows a
# renewed login, or is told what is wrong.
LOGIN_OVER = "LOGIN_OVER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a controller says besides the message."""

    problems: tuple[FieldProblem, ...] = ()
    reason: str = ""
    issuers: tuple[LoginIssuer, ...] = ()
    """Where a caller who is not known gets a token."""


def details(error: grpc.RpcError) -> Details:
    """What is in an error's details."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # a failed call is its error
    problems: list[FieldProblem] = []
    issuers: list[LoginIssuer] = []
    reason = ""
    for detail in status.details if status is not None else ():
        request = error_details_pb2.BadRequest()
        info, issuer = error_details_pb2.ErrorInfo(), LoginIssuer()
        if detail.Unpack(request):
            problems.extend(
                FieldProblem(field=violation.field, message=violation.description)
                for violation in request.field_violations
            )
        elif detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(issuer):
            issuers.append(issuer)
    return Details(problems=tuple(problems), reason=reason, issuers=tuple(issuers))
