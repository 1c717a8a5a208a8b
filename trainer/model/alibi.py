"""Attention with linear biases: the further back a key, the lower its score.

Each head has a slope, which the distance between query and key is multiplied with. Nothing
else says where a token stands. Only differences count, so documents need no places of their own.

Source: Press et al. (arXiv 2108.12409); slopes for other numbers of heads than powers of two as
in its code, which BLOOM and MPT have.
"""

# H query heads of this rank, Q queries, K keys; the last query stands at the last key.
from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

# FlexAttention's: a score, and which sample, head, query and key it is of.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# The slope of the last of a power of two of heads is 2 to the minus this.
_LAST_EXPONENT = 8


def head_slopes(heads: int) -> tuple[float, ...]:
    """A slope for each head of a model."""
    power: int = 2 ** int(math.log2(heads))
    own = [2.0 ** (-_LAST_EXPONENT * head / power) for head in range(1, power + 1)]
    # The others lie between these: every other one of twice as many heads.
    between = [2.0 ** (-_LAST_EXPONENT * (head + 0.5) / power) for head in range(power)]
    return (*own, *between[: heads - power])


def distance_bias(slopes: tuple[float, ...], queries: int, keys: int, like: Tensor) -> Tensor:
    """[1, H, Q, K], of the type of `like`, whatever a query may see."""
    # Exact before it is rounded to a narrow type.
    places = torch.arange(keys, dtype=torch.float64, device=like.device)
    distances_QK = places - places[keys - queries :, None]
    slopes_H = torch.tensor(slopes, dtype=torch.float64, device=like.device)
    return (slopes_H[:, None, None] * distances_QK).to(like.dtype).unsqueeze(0)


def position_bias(
    slopes: tuple[float, ...], queries: int, keys: int, window: int, like: Tensor
) -> Tensor:
    """The same with -inf where a query may not look: behind it, and before its window."""
    return _position_bias(slopes, queries, keys, window, dtype=like.dtype, device=like.device)


# All layers use the same ones, of the few sizes that blocks of a window have.
@functools.lru_cache(maxsize=16)
def _position_bias(
    slopes: tuple[float, ...],
    queries: int,
    keys: int,
    window: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    bias = distance_bias(slopes, queries, keys, torch.empty(0, dtype=dtype, device=device))
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
    allowed = allowed.tril(keys - queries).triu(keys - queries - window + 1)
    return bias.masked_fill(~allowed, -math.inf)


@functools.lru_cache(maxsize=4)
def distance_score(slopes: tuple[float, ...], device: torch.device) -> ScoreMod:
    """The same for FlexAttention, which makes no tensor of it."""
    # One function for all layers: each new one would be compiled again.
    slopes_H = torch.tensor(slopes, dtype=torch.float32, device=device)

    def biased(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + slopes_H[head] * (key - query)

    return biased
