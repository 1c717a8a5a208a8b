"""A small model, cut as the trainer cuts one, and checkpoints of it held in memory.

Written apart from the trainer, so that the two check each other: every tensor has a
dense array, and what a rank holds is slices of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpoint.checksums import CHECKSUM, block_checksum
from checkpoint.core.manifest import Manifest, PartRecord
from checkpoint.core.shards import Rectangle, ShardTensor, lay_out
from checkpoint.core.tiles import Wanted
from trainer.core.rectangles import boxes

NUM_LAYERS = 4
# Shape of a layer's tensor, and the dimension that tensor parallelism cuts.
_OF_LAYER: dict[str, tuple[tuple[int, ...], int | None]] = {
    "norm": ((6,), None),
    "bias": ((8,), 0),
    "column": ((8, 3), 0),
    "row": ((3, 8), 1),
    "planes": ((2, 4, 3), 1),
}
_EMBEDDING: tuple[tuple[int, ...], int | None] = ((12, 3), 0)
_TYPES = {"norm": "float64", "bias": "bfloat16"}
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A layout. `split` says how many layers every chunk of the pipeline has."""

    tp: int
    pp: int
    dp: int
    sharded: bool
    split: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def held_by(self, rank: int) -> list[Wanted]:
        """What a rank holds: for each unit of each of its chunks, a bucket or its shard."""
        tp, dp, pp = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
        found: list[Wanted] = []
        for chunk in range(pp, len(self.split), self.pp):
            first = sum(self.split[:chunk])
            buckets = [
                [f"{layer}.{kind}" for kind in _OF_LAYER]
                for layer in range(first, first + self.split[chunk])
            ]
            if chunk in (0, len(self.split) - 1):
                buckets.append(["embedding"])
            for bucket in buckets:
                found += self._of_bucket(bucket, tp, dp)
        # One rank may have both ends of the pipeline.
        return list(dict.fromkeys(found))

    def _of_bucket(self, names: list[str], tp: int, dp: int) -> Iterator[Wanted]:
        shards = [self._shard(name, tp) for name in names]
        sizes = [math.prod(shard.shape) for shard in shards]
        length = -(-sum(sizes) // self.dp)
        owned = (dp * length, (dp + 1) * length) if self.sharded else (0, sum(sizes))
        start = 0
        for shard, size in zip(shards, sizes, strict=True):
            first, last = max(owned[0] - start, 0), min(owned[1] - start, size)
            for box in boxes(shard.shape, first, last):
                pairs = zip(shard.offsets, box.offsets, strict=True)
                yield shard._replace(
                    offsets=tuple(outer + inner for outer, inner in pairs), shape=box.shape
                )
            start += size

    def _shard(self, name: str, tp: int) -> Wanted:
        kind = name.rpartition(".")[2]
        shape, dim = _OF_LAYER.get(kind, _EMBEDDING)
        offsets, own = [0] * len(shape), list(shape)
        if dim is not None:
            own[dim] //= self.tp
            offsets[dim] = tp * own[dim]
        return Wanted(name, _TYPES.get(kind, "float32"), shape, tuple(offsets), tuple(own))


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    tp, pp = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 4))
    virtual = draw(st.integers(1, NUM_LAYERS // pp)) if pp > 1 else 1
    chunks = pp * virtual
    ends = sorted(
        draw(
            st.lists(
                st.integers(1, NUM_LAYERS - 1),
                unique=True,
                min_size=chunks - 1,
                max_size=chunks - 1,
            )
        )
    )
    edges = [0, *ends, NUM_LAYERS]
    return Cut(
        tp=tp,
        pp=pp,
        dp=draw(st.integers(1, 3)),
        sharded=draw(st.booleans()),
        split=tuple(last - first for first, last in itertools.pairwise(edges)),
    )


def dense(name: str) -> NDArray[np.uint8]:
    """A tensor's bytes, [*shape, bytes of an item]; no two items of a model are alike."""
    shape, _ = _OF_LAYER.get(name.rpartition(".")[2], _EMBEDDING)
    width = _ITEM_BYTES[_TYPES.get(name.rpartition(".")[2], "float32")]
    seed = int.from_bytes(name.encode(), "little")
    return np.random.default_rng(seed).integers(0, 256, (*shape, width), dtype=np.uint8)


def content(held: Wanted | ShardTensor) -> bytes:
    """The bytes of a rectangle, cut from the dense tensor."""
    pairs = zip(held.offsets, held.shape, strict=True)
    return dense(held.name)[tuple(slice(first, first + size) for first, size in pairs)].tobytes()


def checkpoint_of(
    cut: Cut, *, block_bytes: int, redundant: bool = False
) -> tuple[Manifest, list[bytes]]:
    """What the ranks of a layout save, and the payload of each part.

    Each rectangle comes once, from the first rank that holds it; with `redundant` from all.
    """
    saved: dict[int, list[Wanted]] = {}
    seen: set[Wanted] = set()
    for rank in range(cut.size):
        held = [tensor for tensor in cut.held_by(rank) if redundant or tensor not in seen]
        seen.update(held)
        if held:
            saved[rank] = held
    made = [_part_of(rank, cut.size, len(saved), held, block_bytes) for rank, held in saved.items()]
    parts = tuple(part for part, _ in made)
    manifest = Manifest(step=3, attempt=1, world_size=cut.size, parts=parts)
    return manifest, [payload for _, payload in made]


def _part_of(
    rank: int, world_size: int, num_parts: int, held: list[Wanted], block_bytes: int
) -> tuple[PartRecord, bytes]:
    table = lay_out(
        rank,
        world_size,
        [
            Rectangle(
                **tensor._asdict(),
                nbytes=len(content(tensor)),
                prefix_nbytes=16,
                suffix_nbytes=9,
            )
            for tensor in held
        ],
    )
    # What lies around tensors must not end up in one.
    payload = bytearray(b"\xee" * table.payload_bytes)
    for tensor in table.tensors:
        payload[tensor.byte_offset : tensor.byte_offset + tensor.nbytes] = content(tensor)
    blocks = [bytes(payload[at : at + block_bytes]) for at in range(0, len(payload), block_bytes)]
    part = PartRecord(
        step=3,
        attempt=1,
        rank=rank,
        world_size=world_size,
        num_parts=num_parts,
        file=f"{rank}",
        nbytes=len(payload),
        block_bytes=block_bytes,
        checksum=CHECKSUM,
        blocks=tuple(block_checksum(CHECKSUM, block) for block in blocks),
        tensors=table.tensors,
        extra="{}",
    )
    return part, bytes(payload)
