"""What crosses from one pipeline stage to the next, on one rank of a tensor group.

With sequence parallelism each rank holds, and sends, its own part of the
sequence. Without it all ranks of the group hold the same tensor: each sends one
part in t, and the receivers gather the parts among themselves, over the faster
links of the tensor group.

Source: the scatter/gather optimisation of Narayanan et al. (arXiv 2104.04473, 4.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trainer.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The shape between two chunks on this rank, and the group that shares it.

    `replicas` are the ranks that hold the same tensor; None where each has its own.
    """

    shape: tuple[int, ...]
    replicas: Comm | None

    def __post_init__(self) -> None:
        if self.replicas is not None and math.prod(self.shape) % self.replicas.size:
            raise ValueError(
                f"a boundary of {self.shape} cannot be cut into {self.replicas.size} equal parts"
            )

    @property
    def message_shape(self) -> tuple[int, ...]:
        """The shape of what this rank sends and receives."""
        if self.replicas is None:
            return self.shape
        return (math.prod(self.shape) // self.replicas.size,)

    def outgoing(self, tensor: Tensor) -> Tensor:
        """This rank's part of `tensor`."""
        if self.replicas is None:
            return tensor.contiguous()
        return tensor.contiguous().view(self.replicas.size, -1)[self.replicas.index]

    def incoming(self, message: Tensor) -> Tensor:
        """The whole tensor from the parts of all replicas."""
        if self.replicas is None:
            return message
        return self.replicas.all_gather(message).view(self.shape)
