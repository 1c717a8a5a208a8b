"""What a rank holds: rectangles of tensors, and where their bytes lie in its payload.

What a rank owns comes first, and only that goes to storage. Each owned tensor lies in a
frame: constant bytes before and after it that make it a file of torch's own format, so
that the payload as it lies in host memory is what torch's tools read. We ourselves only
ever look at the raw bytes.

    frame_offset   byte_offset           byte_offset + nbytes    frame_offset + frame_nbytes
    | prefix       | raw bytes           | suffix                |

What does not belong here: what a frame looks like (`torch_format/frames.py`), and who owns what
(`ownership.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from checkpoint.core.checked_json import (
    Fields,
    RecordError,
    checked,
    decode_checked,
    encode_checked,
    sha256,
)

# A cache line: wide enough for every dtype and for vector copies. torch aligns the raw
# bytes in its files alike.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """A rectangle of a tensor, and where its bytes lie in the payload of a rank."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int
    nbytes: int
    frame_offset: int
    frame_nbytes: int

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offsets) == len(self.shape):
            raise ValueError(f"shard {self.name}: shape and offsets differ in dimensions")
        for size, offset, length in zip(self.global_shape, self.offsets, self.shape, strict=True):
            if min(offset, length) < 0 or offset + length > size:
                raise ValueError(
                    f"shard {self.name}: {self.offsets} + {self.shape} is not inside "
                    f"{self.global_shape}"
                )
        num_items = math.prod(self.shape)
        if self.nbytes < num_items or (self.nbytes % num_items if num_items else self.nbytes):
            raise ValueError(f"shard {self.name}: {self.nbytes} bytes for {self.shape}")
        if (
            not 0 <= self.frame_offset <= self.byte_offset
            or self.byte_offset + self.nbytes > self.frame_end
        ):
            raise ValueError(f"shard {self.name}: its bytes are not inside its frame")

    @property
    def frame_end(self) -> int:
        return self.frame_offset + self.frame_nbytes

    @property
    def rectangle(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What it is, wherever it lies."""
        return (self.name, self.dtype, self.global_shape, self.offsets, self.shape)


# No slots: a digest takes milliseconds, and is asked for again and again.
@dataclass(frozen=True, kw_only=True)
class ShardTable:
    """Every tensor of a rank, in payload order; the first `num_owned` are its own to save."""

    rank: int
    world_size: int
    num_owned: int
    tensors: tuple[ShardTensor, ...]

    def __post_init__(self) -> None:
        check_rank(self.rank, self.world_size)
        if not 0 <= self.num_owned <= len(self.tensors):
            raise ValueError(f"rank {self.rank} owns {self.num_owned} of {len(self.tensors)}")
        check_places(self.tensors, self.payload_bytes)

    @property
    def owned(self) -> tuple[ShardTensor, ...]:
        """What this rank saves for all that hold the same."""
        return self.tensors[: self.num_owned]

    @property
    def owned_bytes(self) -> int:
        """How much of the payload goes to storage."""
        return _end(self.owned)

    @property
    def payload_bytes(self) -> int:
        return _end(self.tensors)

    @cached_property
    def digest(self) -> int:
        """63 bits that differ when rank, world or tensors do; kept in every slot's header."""
        return int.from_bytes(bytes.fromhex(sha256(self.to_json())[:16]), "little") >> 1

    def to_json(self) -> bytes:
        return encode_checked(
            {
                "num_owned": self.num_owned,
                "rank": self.rank,
                "tensors": tensors_out(self.tensors),
                "world_size": self.world_size,
            }
        )

    @staticmethod
    def from_json(raw: bytes) -> ShardTable:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        fields = decode_checked(raw)
        return checked(
            lambda: ShardTable(
                rank=fields.integer("rank"),
                world_size=fields.integer("world_size"),
                num_owned=fields.integer("num_owned"),
                tensors=tensors_in(fields),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A shard that has no place in a payload yet; only owned ones have a frame."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    owned: bool = True
    prefix_nbytes: int = 0
    suffix_nbytes: int = 0


def lay_out(rank: int, world_size: int, rectangles: Sequence[Rectangle]) -> ShardTable:
    """Give every shard its place in the payload, in the order given: owned ones first."""
    tensors = []
    end = 0
    for shard in rectangles:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        tensors.append(
            ShardTensor(
                name=shard.name,
                dtype=shard.dtype,
                global_shape=shard.global_shape,
                offsets=shard.offsets,
                shape=shard.shape,
                byte_offset=start + shard.prefix_nbytes,
                nbytes=shard.nbytes,
                frame_offset=start,
                frame_nbytes=shard.prefix_nbytes + shard.nbytes + shard.suffix_nbytes,
            )
        )
        end = tensors[-1].frame_end
    num_owned = sum(shard.owned for shard in rectangles)
    if not all(shard.owned for shard in rectangles[:num_owned]):
        raise ValueError(f"rank {rank}: shards that it owns must come before the others")
    return ShardTable(rank=rank, world_size=world_size, num_owned=num_owned, tensors=tuple(tensors))


def check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")


def check_places(tensors: Sequence[ShardTensor], payload_bytes: int) -> None:
    """Raise ValueError unless shards lie one after another within a payload, each once."""
    seen = set()
    end = 0
    for tensor in tensors:
        # One name may come as several rectangles, but each of them once.
        if (tensor.name, tensor.offsets) in seen:
            raise ValueError(f"shard {tensor.name} at {tensor.offsets} is there twice")
        seen.add((tensor.name, tensor.offsets))
        if tensor.frame_offset < end:
            raise ValueError(f"shard {tensor.name} overlaps the one before")
        end = tensor.frame_end
    if end > payload_bytes:
        raise ValueError(f"shards end at byte {end} of {payload_bytes}")


def tensors_out(tensors: Iterable[ShardTensor]) -> list[object]:
    """Shards as a record holds them."""
    return [
        {
            "byte_offset": tensor.byte_offset,
            "dtype": tensor.dtype,
            "frame_nbytes": tensor.frame_nbytes,
            "frame_offset": tensor.frame_offset,
            "global_shape": tensor.global_shape,
            "name": tensor.name,
            "nbytes": tensor.nbytes,
            "offsets": tensor.offsets,
            "shape": tensor.shape,
        }
        for tensor in tensors
    ]


def tensors_in(fields: Fields) -> tuple[ShardTensor, ...]:
    """The shards of a record, which may contradict themselves: ValueError then."""
    shards = fields.inners("tensors")
    if any("frame_offset" not in shard for shard in shards):
        raise RecordError("saved by Outlast 0.1.0, whose checkpoints this version does not read")
    return tuple(
        ShardTensor(
            name=tensor.text("name"),
            dtype=tensor.text("dtype"),
            global_shape=tensor.integers("global_shape"),
            offsets=tensor.integers("offsets"),
            shape=tensor.integers("shape"),
            byte_offset=tensor.integer("byte_offset"),
            nbytes=tensor.integer("nbytes"),
            frame_offset=tensor.integer("frame_offset"),
            frame_nbytes=tensor.integer("frame_nbytes"),
        )
        for tensor in shards
    )


def _end(tensors: Sequence[ShardTensor]) -> int:
    return max((tensor.frame_end for tensor in tensors), default=0)
