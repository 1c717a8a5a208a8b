"""Perplexity: what a loss on held-out text is reported as beside it."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinite where no float can say it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
