"""What can go wrong with an API server, by what the caller should do.

None of these stops training: whoever gets one tries again, later or another way.
"""

from __future__ import annotations

from outlast.errors import FatalError, RetryableError


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
