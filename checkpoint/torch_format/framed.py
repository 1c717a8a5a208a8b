"""Writes checkpoints by hand: payloads in torch's frames, and the records that make them exist.

For what does not come from the host memory of a job: checkpoints taken over from elsewhere
(`convert.py`) and what was saved of a damaged one (`../salvage.py`). Nobody else may write to the
same step meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from checkpoint.checksums import CHECKSUM, block_checksums
from checkpoint.core import names
from checkpoint.core.checked_json import sha256
from checkpoint.core.manifest import BLOCK_BYTES, CommitRecord, Manifest, PartRecord
from checkpoint.core.shards import Rectangle, ShardTable, ShardTensor
from checkpoint.storage.storage import Storage
from checkpoint.torch_format import dcp
from checkpoint.torch_format.frames import frame_of

_WRITE_BYTES = 16 * BLOCK_BYTES

# Hears how many bytes more have been dealt with.
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDraft:
    """What a part's record says besides what lies where."""

    step: int
    attempt: int
    num_parts: int
    extra: str


def framed(
    name: str,
    dtype: str,
    *,
    global_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    nbytes: int,
) -> Rectangle:
    """A rectangle with the frame that makes it readable for torch.

    Raises:
        ValueError, TypeError or RuntimeError: there can be no such tensor.
    """
    frame = frame_of(getattr(torch, dtype), shape)
    return Rectangle(
        name=name,
        dtype=dtype,
        global_shape=global_shape,
        offsets=offsets,
        shape=shape,
        nbytes=nbytes,
        prefix_nbytes=len(frame.prefix),
        suffix_nbytes=len(frame.suffix),
    )


def write_part(
    target: Storage,
    folder: str,
    table: ShardTable,
    raw: Callable[[ShardTensor], Iterable[bytes]],
    draft: PartDraft,
    on_bytes: OnBytes,
) -> PartRecord:
    """Write a rank's payload into `folder`; `raw` gives the bytes of each tensor."""
    blocks: list[int] = []

    def pieces() -> Iterator[bytes]:
        end = 0
        for shard in table.tensors:
            frame = frame_of(getattr(torch, shard.dtype), shard.shape)
            yield bytes(shard.frame_offset - end)
            yield frame.prefix
            yield from raw(shard)
            yield frame.suffix
            end = shard.frame_end
            on_bytes(shard.nbytes)

    def summed() -> Iterator[memoryview]:
        for chunk in _regrouped(pieces()):
            blocks.extend(block_checksums(CHECKSUM, chunk, BLOCK_BYTES))
            yield chunk

    file = names.payload_name(table.rank)
    target.write_chunks(
        f"{folder}/{file}", summed(), nbytes=table.owned_bytes, part_bytes=_WRITE_BYTES
    )
    return PartRecord(
        step=draft.step,
        attempt=draft.attempt,
        rank=table.rank,
        world_size=table.world_size,
        num_parts=draft.num_parts,
        file=file,
        nbytes=table.owned_bytes,
        block_bytes=BLOCK_BYTES,
        checksum=CHECKSUM,
        blocks=tuple(blocks),
        tensors=table.tensors,
        extra=draft.extra,
    )


def write_description(target: Storage, folder: str, manifest: Manifest) -> bytes:
    """Describe the payloads in `folder` to torch; returns the description."""
    description = dcp.describe(manifest)
    target.write_bytes(f"{folder}/{names.METADATA}", description)
    return description


def commit(target: Storage, draft: Manifest) -> None:
    """Make a checkpoint exist whose payloads are written.

    Raises:
        ValueError: somebody else was first.
    """
    folder = names.attempt_folder(draft.step, draft.attempt)
    description = write_description(target, folder, draft)
    raw = replace(draft, metadata_sha256=sha256(description)).to_json()
    target.write_bytes(f"{folder}/{names.MANIFEST}", raw)
    record = CommitRecord(
        step=draft.step,
        attempt=draft.attempt,
        world_size=draft.world_size,
        size_bytes=draft.size_bytes,
        manifest_sha256=sha256(raw),
    )
    if not target.put_if_absent(names.commit_path(draft.step), record.to_json()):
        raise ValueError(f"{target.url}: somebody else has just committed step {draft.step}")


def _regrouped(pieces: Iterator[bytes]) -> Iterator[memoryview]:
    """The same bytes in writes of one size, of which the last may be shorter.

    All have the same memory: each is written when the next is asked for.
    """
    held, filled = memoryview(bytearray(_WRITE_BYTES)), 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            part = rest[: _WRITE_BYTES - filled]
            held[filled : filled + len(part)] = part
            filled += len(part)
            rest = rest[len(part) :]
            if filled == _WRITE_BYTES:
                yield held
                filled = 0
    if filled:
        yield held[:filled]
