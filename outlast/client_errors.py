"""How a controller refuses a call, or does not answer it, as exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from outlast.errors import FatalError, RetryableError
from outlast.grpc_details import LOGIN_OVER, details
from outlast.problems import SpecError
from outlast.v1.access_pb2 import LoginIssuer


class UnavailableError(RetryableError):
    """No controller answers at the address; `why` is what the connection came to."""

    why = ""


class LoginOverError(RetryableError):
    """A stream has ended because its caller's login has; another call shows a renewed one."""


class NotFoundError(FatalError):
    """There is no such job, node, incident or run."""


class RefusedError(FatalError):
    """The controller understood and will not do it; `reason` is a constant, `code` gRPC's,
    `issuers` where a caller without a token gets one."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        code: grpc.StatusCode,
        issuers: Sequence[LoginIssuer] = (),
    ) -> None:
        super().__init__(message)
        self.issuers = tuple(issuers)
        self.reason = reason
        self.code = code


def explained(error: Any, address: str) -> Exception:
    """What gRPC raised, as one of ours."""
    code, message = error.code(), error.details() or ""
    said = details(error)
    if said.problems:
        return SpecError(said.problems)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        away = UnavailableError(
            f"no controller answers at {address} ({message}); "
            "start one with `outlast up`, or give its address"
        )
        away.why = message
        return away
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(message)
    if said.reason == LOGIN_OVER:
        return LoginOverError(message)
    return RefusedError(message or code.name, reason=said.reason, code=code, issuers=said.issuers)
