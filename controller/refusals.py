"""Why the controller takes a request in at another time only."""

from __future__ import annotations

from outlast.errors import RetryableError


class ReadOnlyError(RetryableError):
    """The journal's disk is full: nothing is decided until there is room."""


class ServiceStoppedError(RetryableError):
    """The controller is stopping and takes nothing in any more."""
