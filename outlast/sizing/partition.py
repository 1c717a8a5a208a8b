"""Which layers every model chunk of a pipeline holds. Uneven splits are allowed.

A pipeline of `p` stages with `v` chunks each cuts the model into `p * v` parts;
part `c * p + s` is chunk `c` of stage `s` (Narayanan et al., arXiv 2104.04473, 2.2). Where it
folds, every second chunk goes through the stages backwards: two chunks are a V, whose ends are
both on the first stage (ZB-V: Qi et al., arXiv 2401.10241, 6).
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


def position_of(stage: int, chunk: int, num_stages: int, *, folds: bool = False) -> int:
    """Which part of the model a stage holds as a chunk."""
    along = num_stages - 1 - stage if folds and chunk % 2 else stage
    return chunk * num_stages + along


def chunk_at(position: int, num_stages: int, *, folds: bool = False) -> tuple[int, int]:
    """(stage, chunk) that is a part of the model."""
    chunk, along = divmod(position, num_stages)
    return (num_stages - 1 - along if folds and chunk % 2 else along), chunk


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
    folds: bool = False,
    given: Sequence[int] | None = None,
) -> tuple[ModelPart, ...]:
    """What `stage` holds, one part a chunk."""
    positions = tuple(
        position_of(stage, chunk, num_stages, folds=folds) for chunk in range(num_chunks)
    )
    split = None if given is None else tuple(given)
    return _parts_at(num_layers, num_stages * num_chunks, positions, split)


# A plan asks for every stage, several times, and a search plans thousands of times.
@lru_cache(maxsize=4096)
def _parts_at(
    num_layers: int, num_parts: int, positions: tuple[int, ...], given: tuple[int, ...] | None
) -> tuple[ModelPart, ...]:
    ranges = _split(num_layers, num_parts, given)
    return tuple(
        ModelPart(
            layers=ranges[position],
            is_first=position == 0,
            is_last=position == num_parts - 1,
        )
        for position in positions
    )


@lru_cache(maxsize=256)
def _split(num_layers: int, num_parts: int, given: tuple[int, ...] | None) -> tuple[range, ...]:
    return split_layers(num_layers, num_parts, given)
