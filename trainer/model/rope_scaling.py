"""Rotary frequencies of models that go on with longer sequences than they began with.

Positions are fast along some pairs of values and slow along others. A slow one, whose
wavelength is longer than any sequence of the first training, would come to angles that were
never seen; it is divided by the factor, and so stays within them.

Sources: dynamic NTK and YaRN (arXiv 2309.00071), Llama 3.1 (2407.21783); each in the form of
`transformers`, whose checkpoints are trained with it.
"""

# R half of the rotated width.
from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.model.config import RopeConfig, RopeScaling


def scaled_frequencies(config: RopeConfig, width: int, seq_len: int) -> tuple[Tensor, float]:
    """Radians per position, [R], in fp64, and a factor on queries and keys."""
    scaling = config.scaling
    if scaling is None:
        return _frequencies(config.theta, width), 1.0
    match scaling.kind:
        case "linear":
            return _frequencies(config.theta, width) / scaling.factor, 1.0
        case "dynamic":
            return _frequencies(_dynamic_theta(config.theta, scaling, width, seq_len), width), 1.0
        case "llama3":
            return _by_wavelength(_frequencies(config.theta, width), scaling), 1.0
        case "yarn":
            factor = scaling.attention_factor
            usual = 0.1 * math.log(scaling.factor) + 1.0
            return _yarn(config.theta, scaling, width), usual if factor is None else factor


def _frequencies(theta: float, width: int) -> Tensor:
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    return theta**-powers


def _dynamic_theta(theta: float, scaling: RopeScaling, width: int, seq_len: int) -> float:
    longer = max(1.0, seq_len / scaling.original_seq_len)
    stretch: float = (scaling.factor * longer - (scaling.factor - 1)) ** (width / (width - 2))
    return theta * stretch


def _by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(theta: float, scaling: RopeScaling, width: int) -> Tensor:
    frequencies = _frequencies(theta, width)

    def pair_with(turns: float) -> float:
        """Which pair turns so many times in a sequence of the original length."""
        length = scaling.original_seq_len / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last: float = min(math.ceil(pair_with(scaling.beta_slow)), width - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(width // 2, dtype=torch.float64)
    divided = ((pairs - first) / (last - first)).clamp(0.0, 1.0)
    return divided * frequencies / scaling.factor + (1.0 - divided) * frequencies
