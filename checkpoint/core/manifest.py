"""The records that say what a checkpoint is: parts, manifest, commit.

Records guard themselves (`checked_json.py`). Payloads are covered by checksums of
blocks: a reader verifies the range it needs while it streams, without reading
the rest. The commit record names the manifest by digest, the manifest every
part with its blocks, and torch's own description of the checkpoint: from the
commit down, no byte can change unnoticed.

What does not belong here: reading and writing files.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass

from checkpoint.core.checked_json import (
    Fields,
    canonical,
    checked,
    decode_checked,
    encode_checked,
    sha256,
)
from checkpoint.core.shards import (
    ShardTensor,
    check_places,
    check_rank,
    tensors_in,
    tensors_out,
)

# A reader of another layout needs some rows of a tensor: a block is what it must read
# and verify to get them. Checksums of less would outgrow the rest of the manifest.
BLOCK_BYTES = 4 << 20
# What blocks may be summed with; new ones are with the first.
CHECKSUMS = ("xxh3_64", "crc32")
# Keys are sorted, and this one is the first.
_PART_BEGINS = re.compile(r'\{"attempt":')


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What one rank stored of a step: the tensors that it owns. `extra` is JSON text."""

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
        check_rank(self.rank, self.world_size)
        if self.block_bytes < 1 or self.nbytes < 0:
            raise ValueError(f"part {self.rank}: {self.nbytes} bytes in {self.block_bytes}")
        if len(self.blocks) != -(-self.nbytes // self.block_bytes):
            raise ValueError(f"part {self.rank}: {len(self.blocks)} checksums do not fit its size")
        if self.checksum not in CHECKSUMS:
            raise ValueError(f"part {self.rank}: unknown checksum {self.checksum!r}")
        check_places(self.tensors, self.nbytes)

    def block_range(self, index: int) -> tuple[int, int]:
        """Start and end, in bytes, of a block in the part's file."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.nbytes)

    def to_json(self) -> bytes:
        return encode_checked(_part_out(self))

    @staticmethod
    def from_json(raw: bytes) -> PartRecord:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        return _part_in(decode_checked(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that belongs to one checkpoint; parts in rank order.

    `metadata_sha256` is the digest of torch's own description of the same files, "" where
    there is none. We read nothing from it.
    """

    step: int
    attempt: int
    world_size: int
    parts: tuple[PartRecord, ...]
    metadata_sha256: str = ""

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

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape over all ranks of everything that is saved, by name."""
        saved = (tensor for part in self.parts for tensor in part.tensors)
        return {tensor.name: (tensor.dtype, tensor.global_shape) for tensor in saved}

    @property
    def layout_digest(self) -> str:
        """Differs when the files or the places of tensors in them do; steps do not matter."""
        return sha256(canonical([[part.file, tensors_out(part.tensors)] for part in self.parts]))

    def to_json(self) -> bytes:
        return encode_checked(
            {
                "attempt": self.attempt,
                "metadata_sha256": self.metadata_sha256,
                "parts": [_part_out(part) for part in self.parts],
                "step": self.step,
                "world_size": self.world_size,
            }
        )

    @staticmethod
    def from_json(raw: bytes) -> Manifest:
        """Raises RecordError unless `raw` is exactly what `to_json` gave."""
        fields = decode_checked(raw)
        return checked(
            lambda: Manifest(
                step=fields.integer("step"),
                attempt=fields.integer("attempt"),
                world_size=fields.integer("world_size"),
                parts=tuple(_part_in(part) for part in fields.inners("parts")),
                metadata_sha256=fields.text("metadata_sha256"),
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
        return encode_checked(
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
        fields = decode_checked(raw)
        return CommitRecord(
            step=fields.integer("step"),
            attempt=fields.integer("attempt"),
            world_size=fields.integer("world_size"),
            size_bytes=fields.integer("size_bytes"),
            manifest_sha256=fields.text("manifest_sha256"),
        )


def readable_parts(raw: bytes) -> tuple[PartRecord, ...]:
    """The records of parts that can be read out of a damaged manifest.

    Nothing vouches for them: what they say of bytes must be compared with the bytes.
    """
    text = raw.decode(errors="replace")
    decoder = json.JSONDecoder()
    found = []
    for match in _PART_BEGINS.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(_part_in(Fields(decoder.raw_decode(text, match.start())[0])))
    return tuple(found)


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
        "tensors": tensors_out(part.tensors),
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
            tensors=tensors_in(fields),
            extra=fields.text("extra"),
        )
    )
