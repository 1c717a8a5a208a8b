"""The records that say what a checkpoint is: shard tables, parts, manifest, commit.

Records guard themselves (`sealed.py`). Payloads are covered by checksums of
blocks: a reader verifies the range it needs while it streams, without reading
the rest. The commit record names the manifest by digest, the manifest every
part with its blocks: from the commit down, no byte can change unnoticed.

What does not belong here: reading and writing files.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpoint.core.sealed import Fields, checked, seal, sha256, unseal

# A reader of another layout needs some rows of a tensor: a block is what it must read
# and verify to get them.
BLOCK_BYTES = 4 << 20
CHECKSUM = "crc32"
# A cache line: wide enough for every dtype and for vector copies.
_ALIGNMENT_BYTES = 64


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
        if (
            self.byte_offset < 0
            or self.nbytes < num_items
            or (self.nbytes % num_items if num_items else self.nbytes)
        ):
            raise ValueError(f"shard {self.name}: {self.nbytes} bytes for {self.shape}")

    @property
    def rectangle(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What it is, wherever it lies."""
        return (self.name, self.dtype, self.global_shape, self.offsets, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """Every tensor of a rank, in payload order."""

    rank: int
    world_size: int
    tensors: tuple[ShardTensor, ...]

    def __post_init__(self) -> None:
        _check_rank(self.rank, self.world_size)
        _check_tensors(self.tensors, self.payload_bytes)

    @property
    def payload_bytes(self) -> int:
        return max((tensor.byte_offset + tensor.nbytes for tensor in self.tensors), default=0)

    @property
    def digest(self) -> int:
        """63 bits that differ when rank, world or tensors do; kept in every slot's header."""
        return int.from_bytes(bytes.fromhex(sha256(self.to_json())[:16]), "little") >> 1

    def to_json(self) -> bytes:
        return seal(
            {
                "rank": self.rank,
                "tensors": _tensors_out(self.tensors),
                "world_size": self.world_size,
            }
        )

    @staticmethod
    def from_json(raw: bytes) -> ShardTable:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        fields = unseal(raw)
        return checked(
            lambda: ShardTable(
                rank=fields.integer("rank"),
                world_size=fields.integer("world_size"),
                tensors=_tensors_in(fields),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What one saver rank stored of a step. `extra` is JSON text."""

    step: int
    attempt: int
    rank: int
    world_size: int
    # Parts of the whole checkpoint, so that half of one is never taken for all of it.
    num_parts: int
    file: str
    nbytes: int
    block_bytes: int
    checksum: str
    blocks: tuple[int, ...]
    tensors: tuple[ShardTensor, ...]
    extra: str

    def __post_init__(self) -> None:
        _check_rank(self.rank, self.world_size)
        if self.block_bytes < 1 or self.nbytes < 0:
            raise ValueError(f"part {self.rank}: {self.nbytes} bytes in {self.block_bytes}")
        if len(self.blocks) != -(-self.nbytes // self.block_bytes):
            raise ValueError(f"part {self.rank}: {len(self.blocks)} checksums do not fit its size")
        if self.checksum != CHECKSUM:
            raise ValueError(f"part {self.rank}: unknown checksum {self.checksum!r}")
        _check_tensors(self.tensors, self.nbytes)

    def block_range(self, index: int) -> tuple[int, int]:
        """Start and end, in bytes, of a block in the part's file."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.nbytes)

    def to_json(self) -> bytes:
        return seal(_part_out(self))

    @staticmethod
    def from_json(raw: bytes) -> PartRecord:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        return _part_in(unseal(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that belongs to one checkpoint; parts in rank order."""

    step: int
    attempt: int
    world_size: int
    parts: tuple[PartRecord, ...]

    def __post_init__(self) -> None:
        ranks = [part.rank for part in self.parts]
        if not ranks or ranks != sorted(set(ranks)):
            raise ValueError(f"manifest of step {self.step}: parts of ranks {ranks}")
        if any(part.num_parts != len(ranks) for part in self.parts):
            raise ValueError(f"manifest of step {self.step}: {len(ranks)} parts are not all")
        own = (self.step, self.attempt, self.world_size)
        for part in self.parts:
            if (part.step, part.attempt, part.world_size) != own:
                raise ValueError(
                    f"manifest of step {self.step}: the part of rank {part.rank} is of step "
                    f"{part.step}, attempt {part.attempt}, {part.world_size} ranks"
                )

    @property
    def size_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(part.nbytes for part in self.parts)

    def to_json(self) -> bytes:
        return seal(
            {
                "attempt": self.attempt,
                "parts": [_part_out(part) for part in self.parts],
                "step": self.step,
                "world_size": self.world_size,
            }
        )

    @staticmethod
    def from_json(raw: bytes) -> Manifest:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        fields = unseal(raw)
        return checked(
            lambda: Manifest(
                step=fields.integer("step"),
                attempt=fields.integer("attempt"),
                world_size=fields.integer("world_size"),
                parts=tuple(_part_in(part) for part in fields.inners("parts")),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """The checkpoint of `step` is what `attempt` wrote, under a manifest with this digest."""

    step: int
    attempt: int
    world_size: int
    size_bytes: int
    manifest_sha256: str

    def to_json(self) -> bytes:
        return seal(
            {
                "attempt": self.attempt,
                "manifest_sha256": self.manifest_sha256,
                "size_bytes": self.size_bytes,
                "step": self.step,
                "world_size": self.world_size,
            }
        )

    @staticmethod
    def from_json(raw: bytes) -> CommitRecord:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        fields = unseal(raw)
        return CommitRecord(
            step=fields.integer("step"),
            attempt=fields.integer("attempt"),
            world_size=fields.integer("world_size"),
            size_bytes=fields.integer("size_bytes"),
            manifest_sha256=fields.text("manifest_sha256"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A shard that has no place in a payload yet."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int


def lay_out(rank: int, world_size: int, rectangles: Iterable[Rectangle]) -> ShardTable:
    """Give every shard its place in the payload, in the order given."""
    tensors = []
    end = 0
    for shard in rectangles:
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        tensors.append(
            ShardTensor(
                name=shard.name,
                dtype=shard.dtype,
                global_shape=shard.global_shape,
                offsets=shard.offsets,
                shape=shard.shape,
                byte_offset=start,
                nbytes=shard.nbytes,
            )
        )
        end = start + shard.nbytes
    return ShardTable(rank=rank, world_size=world_size, tensors=tuple(tensors))


def block_checksum(block: bytes | bytearray | memoryview) -> int:
    """The checksum of one block of a payload."""
    return zlib.crc32(block)


def find_part(manifest: Manifest, wanted: Sequence[ShardTensor]) -> PartRecord | None:
    """A part that holds every wanted rectangle; None when no single part does.

    Loading another layout needs rectangles of several parts, which is a plan of its own.
    """
    needed = {tensor.rectangle for tensor in wanted}
    for part in manifest.parts:
        if needed <= {tensor.rectangle for tensor in part.tensors}:
            return part
    return None


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")


def _check_tensors(tensors: Sequence[ShardTensor], payload_bytes: int) -> None:
    seen = set()
    end = 0
    for tensor in tensors:
        # One name may come as several rectangles, but each of them once.
        if (tensor.name, tensor.offsets) in seen:
            raise ValueError(f"shard {tensor.name} at {tensor.offsets} is there twice")
        seen.add((tensor.name, tensor.offsets))
        if tensor.byte_offset < end:
            raise ValueError(f"shard {tensor.name} overlaps the one before")
        end = tensor.byte_offset + tensor.nbytes
    if end > payload_bytes:
        raise ValueError(f"shards end at byte {end} of {payload_bytes}")


def _tensors_out(tensors: Sequence[ShardTensor]) -> list[object]:
    return [
        {
            "byte_offset": tensor.byte_offset,
            "dtype": tensor.dtype,
            "global_shape": tensor.global_shape,
            "name": tensor.name,
            "nbytes": tensor.nbytes,
            "offsets": tensor.offsets,
            "shape": tensor.shape,
        }
        for tensor in tensors
    ]


def _tensors_in(fields: Fields) -> tuple[ShardTensor, ...]:
    return tuple(
        ShardTensor(
            name=tensor.text("name"),
            dtype=tensor.text("dtype"),
            global_shape=tensor.integers("global_shape"),
            offsets=tensor.integers("offsets"),
            shape=tensor.integers("shape"),
            byte_offset=tensor.integer("byte_offset"),
            nbytes=tensor.integer("nbytes"),
        )
        for tensor in fields.inners("tensors")
    )


def _part_out(part: PartRecord) -> dict[str, object]:
    return {
        "attempt": part.attempt,
        "block_bytes": part.block_bytes,
        "blocks": part.blocks,
        "checksum": part.checksum,
        "extra": part.extra,
        "file": part.file,
        "nbytes": part.nbytes,
        "num_parts": part.num_parts,
        "rank": part.rank,
        "step": part.step,
        "tensors": _tensors_out(part.tensors),
        "world_size": part.world_size,
    }


def _part_in(fields: Fields) -> PartRecord:
    return checked(
        lambda: PartRecord(
            step=fields.integer("step"),
            attempt=fields.integer("attempt"),
            rank=fields.integer("rank"),
            world_size=fields.integer("world_size"),
            num_parts=fields.integer("num_parts"),
            file=fields.text("file"),
            nbytes=fields.integer("nbytes"),
            block_bytes=fields.integer("block_bytes"),
            checksum=fields.text("checksum"),
            blocks=fields.integers("blocks"),
            tensors=_tensors_in(fields),
            extra=fields.text("extra"),
        )
    )
