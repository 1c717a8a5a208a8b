"""A checkpoint as `torch.distributed.checkpoint` sees it: `python -m checkpoint.dcp`.

Reads a manifest from standard input and writes torch's description of the same files to
standard output. With it beside our payloads, `torch.distributed.checkpoint.load` and
`python -m torch.distributed.checkpoint.format_utils dcp_to_torch` read the folder.

Names become keys of two levels, as in `{"model": {...}, "optim": {...}}`.
"""

from __future__ import annotations

import pickle
import sys

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.core.manifest import Manifest
from checkpoint.core.shards import ShardTensor


def main() -> None:
    """Describe the manifest on standard input."""
    manifest = Manifest.from_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(describe(manifest))


def describe(manifest: Manifest) -> bytes:
    """The bytes of `.metadata` beside the payloads of this manifest."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for part in manifest.parts:
        for shard in part.tensors:
            known = tensors.setdefault(shard.name, _tensor(shard))
            known.chunks.append(
                ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.shape))
            )
            places[MetadataIndex(shard.name, shard.offsets)] = _StorageInfo(
                part.file, shard.frame_offset, shard.frame_nbytes
            )
    return pickle.dumps(
        Metadata(
            state_dict_metadata=dict(tensors),
            planner_data={name: tuple(name.split(".", 1)) for name in tensors},
            storage_data=places,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )


def _tensor(shard: ShardTensor) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, shard.dtype))
    return TensorStorageMetadata(properties, torch.Size(shard.global_shape), chunks=[])


if __name__ == "__main__":
    main()
