"""Which layers every model chunk of a pipeline holds. Uneven splits are allowed.

A pipeline of `p` stages with `v` chunks each cuts the model into `p * v` parts;
part `c * p + s` is chunk `c` of stage `s` (Narayanan et al., arXiv 2104.04473, 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Consecutive layers, and whether the embedding or the output goes with them."""

    layers: range
    is_first: bool
    is_last: bool


def split_layers(
    num_layers: int, num_parts: int, given: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Consecutive layers for every part, first part first; `given` counts them if not None.

    When the layers do not divide evenly, the first parts take one more: the
    last one also runs the output projection and the loss.
    """
    if not 1 <= num_parts <= num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_parts} parts")
    base, extra = divmod(num_layers, num_parts)
    counts = given or [base + (1 if part < extra else 0) for part in range(num_parts)]
    if len(counts) != num_parts or sum(counts) != num_layers or min(counts) < 1:
        raise ValueError(
            f"a split into {list(counts)} layers is not one of {num_layers} layers into "
            f"{num_parts} parts of one or more"
        )
    parts = []
    first = 0
    for count in counts:
        parts.append(range(first, first + count))
        first += count
    return tuple(parts)


def stage_parts(
    num_layers: int,
    *,
    stage: int,
    num_stages: int,
    num_chunks: int = 1,
    given: Sequence[int] | None = None,
) -> tuple[ModelPart, ...]:
    """What `stage` holds, one part a chunk."""
    split = None if given is None else tuple(given)
    return _stage_parts(num_layers, stage, num_stages, num_chunks, split)


# A plan asks for every stage, several times, and a search plans thousands of times.
@lru_cache(maxsize=4096)
def _stage_parts(
    num_layers: int, stage: int, num_stages: int, num_chunks: int, given: tuple[int, ...] | None
) -> tuple[ModelPart, ...]:
    ranges = _split(num_layers, num_stages * num_chunks, given)
    positions = [chunk * num_stages + stage for chunk in range(num_chunks)]
    return tuple(
        ModelPart(
            layers=ranges[position],
            is_first=position == 0,
            is_last=position == len(ranges) - 1,
        )
        for position in positions
    )


@lru_cache(maxsize=256)
def _split(num_layers: int, num_parts: int, given: tuple[int, ...] | None) -> tuple[range, ...]:
    return split_layers(num_layers, num_parts, given)
