"""Rotary positions: pairs of values of a query or key turn with their position.

Source: RoFormer (arXiv 2104.09864). Which values make a pair differs between
models: i and i + width/2 (Llama, GPT-NeoX), or 2i and 2i + 1 (GPT-J, Cohere).
"""

# S sequence, B micro-batch, H heads, C head width, R half of the rotated width.
from __future__ import annotations

import functools

import torch
from torch import Tensor

from trainer.model.config import RopeConfig
from trainer.model.rope_scaling import scaled_frequencies


def rotate(
    x_SBHC: Tensor,
    config: RopeConfig,
    places_SB: Tensor | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """x with its first `fraction` of each head turned by its place; None: that along dim 0.

    `seq_len` is that of the whole sequence, where x is a part of it; places may be the same for
    all of a batch, [S, 1].
    """
    width = rotated_width(x_SBHC.shape[-1], config)
    cos_SR, sin_SR = _tables(
        seq_len or x_SBHC.shape[0], width, config, dtype=x_SBHC.dtype, device=x_SBHC.device
    )
    if places_SB is None:
        cos, sin = cos_SR[:, None, None, :], sin_SR[:, None, None, :]
    else:
        cos, sin = cos_SR[places_SB].unsqueeze(2), sin_SR[places_SB].unsqueeze(2)
    turning, rest = x_SBHC[..., :width], x_SBHC[..., width:]
    if config.pairs == "halves":
        first, second = turning.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, rest), dim=-1)
    first, second = torch.unflatten(turning, -1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


def rotated_width(head_width: int, config: RopeConfig) -> int:
    """Values of a head that turn: an even number."""
    # Rounded, as the spec's rules do: as floats 0.58 of 100 is not quite 58.
    return round(head_width * config.fraction) // 2 * 2


# Layers of a rank use one, or two where local ones differ; evaluation may use another length.
@functools.lru_cache(maxsize=8)
def _tables(
    seq_len: int, width: int, config: RopeConfig, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i/width), [S, R]; exact before rounding to dtype."""
    frequencies, factor = scaled_frequencies(config, width, seq_len)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    tables = (angles.cos(), angles.sin())
    if factor != 1.0:
        tables = (factor * tables[0], factor * tables[1])
    return tables[0].to(device, dtype), tables[1].to(device, dtype)
