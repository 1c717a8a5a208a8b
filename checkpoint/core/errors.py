"""What can be wrong with a checkpoint itself."""

from __future__ import annotations

from outlast.errors import FatalError


class CorruptCheckpointError(FatalError):
    """A checkpoint that must not be loaded; an older one may be whole.

    `step` is the checkpoint's, `what` says which file is wrong and how.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"checkpoint step {step}: {what}")
        self.step = step
        self.what = what


class NoCheckpointError(FatalError):
    """Checkpoints were committed, and none of them can be loaded: a person has to decide."""


class LayoutMismatchError(FatalError):
    """A checkpoint whose shards are cut otherwise than the tensors to fill."""
