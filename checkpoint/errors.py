"""What can be wrong with a checkpoint or with the place where it lies."""

from __future__ import annotations

from outlast.errors import FatalError, RetryableError


class CorruptCheckpointError(FatalError):
    """A checkpoint that must not be loaded; an older one may be whole.

    `step` is the checkpoint's, `what` says which file is wrong and how.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"checkpoint step {step}: {what}")
        self.step = step
        self.what = what


class LayoutMismatchError(FatalError):
    """A checkpoint whose shards are cut otherwise than the tensors to fill."""


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
