"""Where a rank's tokens are in the sequence, where ranks divide it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from trainer.core.context import Range, own_pieces, own_places
from trainer.model.config import GptConfig
from trainer.parallel.comm import Comm


def is_in_ring(config: GptConfig, cp: Comm) -> bool:
    """Whether attention stays with the own part of the sequence."""
    return cp.size > 1 and config.context == "ring"


def places_of(config: GptConfig, cp: Comm, device: torch.device) -> Tensor:
    """The places of the own tokens, in their order, [L]."""
    return _places(config.seq_len, cp.index, cp.size, is_in_ring(config, cp), device)


def pieces_of(config: GptConfig, cp: Comm) -> tuple[tuple[Range, ...], ...]:
    """The pieces of each rank's part."""
    in_ring = is_in_ring(config, cp)
    return tuple(
        own_pieces(config.seq_len, part, cp.size, in_ring=in_ring) for part in range(cp.size)
    )


# All layers ask for the same ones.
@functools.lru_cache(maxsize=4)
def _places(seq_len: int, part: int, num_parts: int, in_ring: bool, device: torch.device) -> Tensor:
    return torch.tensor(own_places(seq_len, part, num_parts, in_ring=in_ring), device=device)
