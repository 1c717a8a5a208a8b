"""How the parameters of a rank lie one after another: a bucket per unit of the model.

A unit is a transformer block, what comes before the blocks of a chunk, or what
comes after them. A bucket is what data-parallel replicas exchange in one
message and what ZeRO cuts into equal contiguous shards; its size is the grain
of overlap and of memory. A tied embedding is a bucket of its own, so that both
copies are cut alike; so are the experts of a layer that replicas divide among them,
as fewer exchange these, and a norm of embeddings, which a backward pass needs without
their tables.

Within a bucket what is treated alike is contiguous: vectors and matrices that
tensor parallelism shards, then matrices and vectors that it replicates. So
`decayed` (all matrices) and `replicated` are one slice each.

What does not belong here: the memory that holds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from trainer.model.facts import ParameterFacts

_BLOCKS = "blocks"
EMBEDDING_NORM = "embedding_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are exchanged together; slices count elements from its start."""

    chunk: int
    unit: str
    slices: Mapping[str, slice]
    size: int
    decayed: slice
    replicated: slice
    tied: bool
    counted: bool
    divided: bool = False
    """Whether it is of experts that replicas divide among them."""

    @property
    def is_block(self) -> bool:
        """A block is used by itself, as its experts are; other units as long as their chunk is."""
        return self.unit.startswith(f"{_BLOCKS}.")

    def shard(self, index: int, count: int) -> slice:
        """The range of replica `index`: all of one length; the last may end in padding."""
        length = -(-self.size // count)
        return slice(index * length, (index + 1) * length)


def overlap(one: slice, other: slice) -> slice:
    """What two slices share; empty slices start where they stop."""
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def plan_buckets(
    chunks: Sequence[nn.Module], facts: Mapping[str, ParameterFacts], *, tp_size: int
) -> tuple[Bucket, ...]:
    """The buckets of all chunks in the order of their use by a forward pass.

    What two chunks share is in one of the first that has it.
    """
    buckets: list[Bucket] = []
    for number, chunk in enumerate(chunks):
        known = {name for bucket in buckets for name in bucket.slices}
        units = _units([name for name, _ in chunk.named_parameters() if name not in known], facts)
        for unit, names in units.items():
            buckets.append(_bucket(number, unit, {name: facts[name] for name in names}, tp_size))
    return tuple(buckets)


def _units(chunk: Sequence[str], facts: Mapping[str, ParameterFacts]) -> dict[str, list[str]]:
    units: dict[str, list[str]] = {}
    unit = "embedding"
    for name in chunk:
        parts = name.split(".")
        if parts[0] == _BLOCKS:
            unit = ".".join(parts[:2])
        elif unit.startswith(_BLOCKS):
            unit = "head"
        own = ".".join(parts[:-1]) if facts[name].divided else unit
        own = EMBEDDING_NORM if parts[0] == EMBEDDING_NORM else own
        units.setdefault("tied" if facts[name].tied else own, []).append(name)
    if "tied" in units and not facts[units["tied"][0]].counted:
        # The copy at the end of the model is used after the blocks.
        units["tied"] = units.pop("tied")
    return units


def _bucket(chunk: int, unit: str, facts: Mapping[str, ParameterFacts], tp_size: int) -> Bucket:
    names = sorted(facts, key=lambda name: _order(facts[name], tp_size))
    slices: dict[str, slice] = {}
    sizes = [0] * _NUM_ORDERS
    start = 0
    for name in names:
        size = math.prod(facts[name].shape)
        slices[name] = slice(start, start + size)
        start += size
        sizes[_order(facts[name], tp_size)] += size
    matrices = sizes[_SHARDED_VECTOR] + sizes[_SHARDED_MATRIX]
    return Bucket(
        chunk=chunk,
        unit=unit,
        slices=slices,
        size=start,
        decayed=slice(sizes[_SHARDED_VECTOR], matrices + sizes[_REPLICATED_MATRIX]),
        replicated=slice(matrices, start),
        tied=unit == "tied",
        counted=all(known.counted for known in facts.values()),
        divided=all(known.divided for known in facts.values()),
    )


# Places in a bucket.
_SHARDED_VECTOR, _SHARDED_MATRIX, _REPLICATED_MATRIX, _REPLICATED_VECTOR = range(4)
_NUM_ORDERS = 4


def _order(facts: ParameterFacts, tp_size: int) -> int:
    # With a single tensor rank nothing is sharded, and the order need not care.
    sharded = facts.is_sharded or tp_size == 1
    if facts.decays:
        return _SHARDED_MATRIX if sharded else _REPLICATED_MATRIX
    return _SHARDED_VECTOR if sharded else _REPLICATED_VECTOR
