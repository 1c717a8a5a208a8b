"""What can be wrong with a checkpoint or with the place where it lies."""

from __future__ import annotations

from checkpoint.core.errors import CorruptCheckpointError, LayoutMismatchError, NoCheckpointError
from outlast.errors import RetryableError

__all__ = [
    "CorruptCheckpointError",
    "DamagedMemoryError",
    "LayoutMismatchError",
    "NoCheckpointError",
    "RootTakenError",
    "StorageTimeoutError",
    "StorageUnavailableError",
]


class DamagedMemoryError(CorruptCheckpointError):
    """Host memory does not hold what was written to it: a slot that must not be used.

    `slot` is -1 where it is not one slot in particular, `held` says that it is the copy of
    another node's rank.
    """

    def __init__(
        self, *, rank: int, slot: int, step: int, attempt: int, what: str, held: bool = False
    ) -> None:
        where = "host memory" if slot < 0 else f"host memory, slot {slot}"
        whose = f"the copy of rank {rank}" if held else f"rank {rank}"
        super().__init__(step, f"{where} of {whose}: {what}")
        self.rank = rank
        self.slot = slot
        self.attempt = attempt
        self.problem = what

    def of_copy(self) -> DamagedMemoryError:
        """The same of the copy of another node's rank."""
        return DamagedMemoryError(
            rank=self.rank,
            slot=self.slot,
            step=self.step,
            attempt=self.attempt,
            what=self.problem,
            held=True,
        )


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
