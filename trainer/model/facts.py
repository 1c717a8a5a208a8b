"""What is known of a parameter, whatever rank asks: its place in the whole model.

Initial values come from a seed per parameter *name*: the full tensor is
generated and then sliced, so every layout starts from the same model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """One parameter of the whole model, and this rank's shard of it.

    `std` is the standard deviation of initial values for init="normal". `tied`
    marks the two copies of an embedding that the first and last stage share;
    `counted` is False on the copy that global figures must not count again. `stored` is the name
    of the whole tensor: where a rank holds two places of one, each is a parameter of its own.
    `stacked` says that the first dimension counts tensors that are drawn one by one. `divided`
    marks experts that replicas divide among them.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0
    tied: bool = False
    counted: bool = True
    stored: str = ""
    stacked: bool = False
    divided: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.shape != self.global_shape

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices, not to norms and biases."""
        return len(self.global_shape) > 1

    def initial(self, seed: int, name: str) -> Tensor:
        """This rank's shard of the initial values, in fp32; the same on every layout."""
        match self.init:
            case "normal":
                return _stacked(seed, name, self) if self.stacked else _normal(seed, name, self)
            case "zeros":
                return torch.zeros(self.shape)
            case "ones":
                return torch.ones(self.shape)


def _stacked(seed: int, name: str, facts: ParameterFacts) -> Tensor:
    """As `_normal`, by tensor of the stack: only those held are drawn."""
    first, *offsets = facts.offsets
    count, *shape = facts.shape
    one = replace(
        facts,
        global_shape=facts.global_shape[1:],
        offsets=tuple(offsets),
        shape=tuple(shape),
        stacked=False,
    )
    return torch.stack([_normal(seed, f"{name}/{first + each}", one) for each in range(count)])


def _normal(seed: int, name: str, facts: ParameterFacts) -> Tensor:
    """This rank's slice of a normal tensor that depends on the seed and the name only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(facts.global_shape, dtype=torch.float32)
    full.normal_(0.0, facts.std, generator=generator)
    for dim, (offset, size) in enumerate(zip(facts.offsets, facts.shape, strict=True)):
        full = full.narrow(dim, offset, size)
    return full
