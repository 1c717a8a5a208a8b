"""Which layers a pipeline stage holds. Uneven splits are allowed."""

from __future__ import annotations


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Consecutive layers for every stage, first stage first.

    When the layers do not divide evenly, the first stages take one more: the
    last stage also runs the output projection and the loss.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages")
    base, extra = divmod(num_layers, num_stages)
    parts = []
    first = 0
    for stage in range(num_stages):
        count = base + (1 if stage < extra else 0)
        parts.append(range(first, first + count))
        first += count
    return tuple(parts)
