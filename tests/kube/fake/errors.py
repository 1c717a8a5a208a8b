"""Refusals as the API server words them: a code, a reason for programs, a message for people."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is answered with a Status of failure."""

    def __init__(
        self, code: int, reason: str, message: str, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    def status(self) -> dict[str, Any]:
        """The body of the answer."""
        details = {} if self.retry_after_s is None else {"retryAfterSeconds": self.retry_after_s}
        reason = {"reason": self.reason} if self.reason else {}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            **reason,
            "details": details,
            "code": self.code,
        }


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{what} "{name}" not found')


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(what: str, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{what} "{name}" already exists')


def conflict(what: str, name: str, why: str) -> ApiError:
    return ApiError(409, "Conflict", f'Operation cannot be fulfilled on {what} "{name}": {why}')


def changed(what: str, name: str) -> ApiError:
    return conflict(
        what,
        name,
        "the object has been modified; please apply your changes to the latest version and "
        "try again",
    )


def invalid(what: str, name: str, why: str) -> ApiError:
    return ApiError(422, "Invalid", f'{what} "{name}" is invalid: {why}')


def bad_request(why: str) -> ApiError:
    return ApiError(400, "BadRequest", why)


def forbidden(why: str) -> ApiError:
    return ApiError(403, "Forbidden", why)


def gone(why: str) -> ApiError:
    return ApiError(410, "Expired", why)
