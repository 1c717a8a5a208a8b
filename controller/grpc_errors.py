"""Errors as gRPC status with `google.rpc` details: for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from controller.core.events import Event
from controller.poison import PoisonedError
from controller.service import Service
from outlast.errors import RetryableError
from outlast.problems import FieldProblem, SpecError

DOMAIN = "outlast"

Context = grpc.aio.ServicerContext[Any, Any]


async def abort(
    context: Context,
    code: grpc.StatusCode,
    message: str,
    *,
    reason: str,
    metadata: Mapping[str, str] | None = None,
    details: Iterable[Message] = (),
) -> NoReturn:
    """End the call with an error. `reason` is a constant that programs compare."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata or {})
    packed = []
    for detail in (info, *details):
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    status = rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=message, details=packed)
    )
    await context.abort(code, message, tuple(status.trailing_metadata or ()))
    raise AssertionError("abort returns never")


async def not_found(context: Context, kind: str, name: str, hint: str) -> NoReturn:
    """There is no such thing."""
    await abort(
        context,
        grpc.StatusCode.NOT_FOUND,
        f"there is no {kind} {name!r}; {hint}",
        reason=f"{kind.upper()}_NOT_FOUND",
        metadata={kind: name},
    )


async def refused(context: Context, message: str, *, reason: str) -> NoReturn:
    """The request is fine, the state of things is not."""
    await abort(context, grpc.StatusCode.FAILED_PRECONDITION, message, reason=reason)


async def unavailable(context: Context, error: RetryableError, *, reason: str) -> NoReturn:
    """Not now; `error` says why, and after how long it may be tried again."""
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(round(error.after_s * 1e9))
    retry = error_details_pb2.RetryInfo(retry_delay=delay)
    code = grpc.StatusCode.UNAVAILABLE
    await abort(context, code, str(error), reason=reason, details=[retry])


async def tell(context: Context, service: Service, *events: Event) -> None:
    """Have the machine handle a request, and wait until that is durable."""
    try:
        await service.tell(*events)
    except RetryableError as error:
        await unavailable(context, error, reason="UNAVAILABLE")
    except PoisonedError as error:
        await abort(context, grpc.StatusCode.INTERNAL, str(error), reason="POISONED")


async def bad_request(context: Context, error: SpecError, message: str = "") -> NoReturn:
    """Every field that is wrong, at once; `message` is for requests that have no spec."""
    violations = [
        error_details_pb2.BadRequest.FieldViolation(
            field=problem.field, description=problem.message
        )
        for problem in error.problems
    ]
    await abort(
        context,
        grpc.StatusCode.INVALID_ARGUMENT,
        message or str(error),
        reason="INVALID_SPEC",
        details=[error_details_pb2.BadRequest(field_violations=violations)],
    )


async def bad_field(context: Context, field: str, message: str) -> NoReturn:
    """One field of a request is wrong."""
    error = SpecError((FieldProblem(field=field, message=message),))
    await bad_request(context, error, f"{field}: {message}")
