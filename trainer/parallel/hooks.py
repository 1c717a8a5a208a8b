"""What happens around each use of a chunk: ZeRO gathers and reduces there, passes are timed.

A backward pass is one, between `before_backward` and `after_backward`; or it is split, and is
between `before_backward` and `after_inputs`, and later once more between `before_weights` and
`after_weights`.
"""

from __future__ import annotations

from typing import Protocol


class ChunkHooks(Protocol):
    """Called by the pipeline engine. `last`: the chunk's last such pass of this step."""

    def before_forward(self, chunk: int, micro_batch: int) -> None: ...

    def after_forward(self, chunk: int, micro_batch: int) -> None: ...

    def before_backward(self, chunk: int, micro_batch: int) -> None: ...

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None: ...

    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        """Weights are not needed any more; some of their gradients are still to come."""

    def before_weights(self, chunk: int, micro_batch: int) -> None: ...

    def after_weights(self, chunk: int, micro_batch: int) -> None: ...


class NoHooks:
    """Nothing happens around the uses of a chunk."""

    def before_forward(self, chunk: int, micro_batch: int) -> None:
        pass

    def after_forward(self, chunk: int, micro_batch: int) -> None:
        pass

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        pass

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        pass

    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        pass

    def before_weights(self, chunk: int, micro_batch: int) -> None:
        pass

    def after_weights(self, chunk: int, micro_batch: int) -> None:
        pass
