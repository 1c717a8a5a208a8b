"""What can be wrong with a checkpoint or with the place where it lies."""

from __future__ import annotations

from checkpoint.core.errors import CorruptCheckpointError, LayoutMismatchError
from outlast.errors import RetryableError

__all__ = [
    "CorruptCheckpointError",
    "LayoutMismatchError",
    "RootTakenError",
    "StorageTimeoutError",
    "StorageUnavailableError",
]


class StorageUnavailableError(RetryableError):
    """Storage did not do what was asked: refused, full, unreachable or too slow.

    `lasting` is true where waiting a moment cannot help: full, forbidden,
    read-only.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class StorageTimeoutError(StorageUnavailableError):
    """A call to storage did not come back within its deadline; it may still be going on."""


class RootTakenError(StorageUnavailableError):
    """The checkpoint root belongs to another job; waiting does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, lasting=True)
