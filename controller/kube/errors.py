"""What can go wrong with an API server, by what the caller should do.

None of these stops training: whoever gets one tries again, later or another way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outlast.errors import FatalError, RetryableError

_FORBIDDEN = 403
# How long a rate limit lasts when the server does not say.
_DEFAULT_AFTER_S = 1.0


class NoClusterError(FatalError):
    """Nothing says where the API server is, or how to speak to it."""


class KubeError(RetryableError):
    """The API server was not reached, or did not do what it was asked."""


class UnreachableError(KubeError):
    """No answer in time, or none at all: what was asked may have been done or not."""


class NotFoundError(KubeError):
    """It is not there."""


class ConflictError(KubeError):
    """It exists already, or has changed since it was read: look again."""


class ExpiredError(KubeError):
    """The version to go on from is too old: list again."""


class TooManyRequestsError(KubeError):
    """A disruption budget or a rate limit: the same may be allowed later."""


class ForbiddenError(KubeError):
    """The controller lacks the right: a person must grant it."""


class RefusedError(KubeError):
    """The API server found the request wrong, a rule of the cluster forbids it, or it failed."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def status_of(data: bytes) -> dict[str, Any]:
    """What a server says in an answer that refuses something."""
    try:
        document = json.loads(data)
    except ValueError:
        return {"message": data[:200].decode(errors="replace")}
    return document if isinstance(document, dict) else {"message": str(document)[:200]}


def error_of(
    code: int, status: Mapping[str, Any], what: str, headers: Mapping[str, str] | None
) -> KubeError:
    """Such an answer, by what is to be done about it."""
    message = str(status.get("message") or "")
    text = f"{what}: {code} {status.get('reason') or ''}: {message}"
    # Quotas and admission rules of the cluster answer 403 too: only the words tell.
    lacks_rights = code == 401 or (code == _FORBIDDEN and " cannot " in message)
    match code:
        case 401 | 403 if lacks_rights:
            return ForbiddenError(f"{text}; see the rights in deploy/kubernetes")
        case 404:
            return NotFoundError(text)
        case 409:
            return ConflictError(text)
        case 410:
            return ExpiredError(text)
        case 429:
            return TooManyRequestsError(text, after_s=_after_s(headers))
        case _:
            return RefusedError(text, status=code)


def _after_s(headers: Mapping[str, str] | None) -> float:
    try:
        return max(0.1, float((headers or {}).get("Retry-After", "")))
    except ValueError:
        return _DEFAULT_AFTER_S
