"""Parameters that know where they stand in the whole model.

Every parallel module declares its parameters with their global shape; the
shard that a rank holds follows from the mesh. `FlatParameters` then lays all
of a rank's parameters, and their gradients, into one flat buffer each, so that
synchronisation, clipping and the optimizer are a few operations on slices.

Initial values come from a seed per parameter *name*: the full tensor is
generated and then sliced, so every layout starts from the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """One parameter of the whole model, and this rank's shard of it.

    `std` is the standard deviation of initial values for init="normal". `tied`
    marks the two copies of an embedding that the first and last stage share;
    `counted` is False on the copy that global figures must not count again.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0
    tied: bool = False
    counted: bool = True

    @property
    def is_sharded(self) -> bool:
        return self.shape != self.global_shape

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices, not to norms and biases."""
        return len(self.global_shape) > 1


class ParallelModule(nn.Module):
    """A module that declares its parameters by their global shape."""

    def __init__(self, comm: Comm, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.comm = comm
        self.facts: dict[str, ParameterFacts] = {}
        self._dtype = dtype
        self._device = device

    def declare(
        self,
        name: str,
        global_shape: tuple[int, ...],
        *,
        init: Literal["normal", "zeros", "ones"],
        std: float = 0.0,
        shard_dim: int | None = None,
        tied: bool = False,
        counted: bool = True,
    ) -> nn.Parameter:
        """Register a parameter, split over the group along `shard_dim` if given."""
        shape, offsets = list(global_shape), [0] * len(global_shape)
        if shard_dim is not None:
            shape[shard_dim] //= self.comm.size
            offsets[shard_dim] = self.comm.index * shape[shard_dim]
        self.facts[name] = ParameterFacts(
            global_shape=global_shape,
            offsets=tuple(offsets),
            shape=tuple(shape),
            init=init,
            std=std,
            tied=tied,
            counted=counted,
        )
        parameter = nn.Parameter(torch.empty(shape, dtype=self._dtype, device=self._device))
        self.register_parameter(name, parameter)
        return parameter


class FlatParameters:
    """All parameters of a rank in one buffer, all gradients in another.

    The order groups what is treated alike: tied, sharded matrices, replicated
    matrices, replicated vectors, sharded vectors. So `tied`, `decayed` (all
    matrices) and `replicated` are each one slice.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, tp_size: int) -> None:
        self.facts = {
            name: facts for chunk in chunks for name, facts in _collect_facts(chunk).items()
        }
        parameters = {
            name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()
        }
        names = sorted(self.facts, key=lambda name: _order(self.facts[name], tp_size))
        like = parameters[names[0]]
        total = sum(parameters[name].numel() for name in names)
        self.values = like.new_empty(total)
        self.grads = like.new_zeros(total)
        self.slices: dict[str, slice] = {}
        sizes = [0] * (_NUM_ORDERS + 1)
        start = 0
        for name in names:
            parameter, facts = parameters[name], self.facts[name]
            part = slice(start, start + parameter.numel())
            parameter.data = self.values[part].view(facts.shape)
            parameter.grad = self.grads[part].view(facts.shape)
            self.slices[name] = part
            start = part.stop
            sizes[_order(facts, tp_size) + 1] += parameter.numel()
        starts = [sum(sizes[: index + 1]) for index in range(_NUM_ORDERS + 1)]
        self.tied = slice(starts[_TIED], starts[_TIED + 1])
        self.decayed = slice(0, starts[_REPLICATED_VECTOR])
        self.replicated = slice(starts[_REPLICATED_MATRIX], starts[_SHARDED_VECTOR])

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat buffer that belongs to one parameter, in its shape."""
        return flat[self.slices[name]].view(self.facts[name].shape)

    def initialise(self, seed: int) -> None:
        """Initial values, the same on every layout."""
        for name, facts in self.facts.items():
            target = self.view(self.values, name)
            match facts.init:
                case "normal":
                    target.copy_(_normal(seed, name, facts))
                case "zeros":
                    target.zero_()
                case "ones":
                    target.fill_(1.0)


# Places in the flat buffers.
_TIED, _SHARDED_MATRIX, _REPLICATED_MATRIX, _REPLICATED_VECTOR, _SHARDED_VECTOR = range(5)
_NUM_ORDERS = 5


def _order(facts: ParameterFacts, tp_size: int) -> int:
    if facts.tied:
        return _TIED
    # With a single tensor rank nothing is sharded, and the order need not care.
    sharded = facts.is_sharded or tp_size == 1
    if facts.decays:
        return _SHARDED_MATRIX if sharded else _REPLICATED_MATRIX
    return _SHARDED_VECTOR if sharded else _REPLICATED_VECTOR


def _collect_facts(module: nn.Module) -> dict[str, ParameterFacts]:
    return {
        f"{path}.{name}" if path else name: facts
        for path, part in module.named_modules()
        if isinstance(part, ParallelModule)
        for name, facts in part.facts.items()
    }


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
