"""torch's description of a checkpoint is what torch itself would pickle."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

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
from checkpoint.storage.storage import Storage
from checkpoint.torch_format import dcp
from checkpoint.torch_format.describe import Describer
from checkpoint.upload.commit import Coordinator
from tests.checkpoint.helpers import (
    DEADLINE_S,
    commit_rules,
    commit_steps,
    load_alone,
    make_tensors,
)


def manifest_of(url: str, tmp_path: Path) -> Manifest:
    commit_steps(url, tmp_path / "memory", [4])
    return Storage(url).read_commit(4)[1]


def described_by_torch(manifest: Manifest) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    places = {}
    for part in manifest.parts:
        for shard in part.tensors:
            properties = TensorProperties(dtype=getattr(torch, shard.dtype))
            size = torch.Size(shard.global_shape)
            known = tensors.setdefault(shard.name, TensorStorageMetadata(properties, size, []))
            chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.shape))
            known.chunks.append(chunk)
            places[MetadataIndex(shard.name, shard.offsets)] = _StorageInfo(
                part.file, shard.frame_offset, shard.frame_nbytes
            )
    return Metadata(
        state_dict_metadata=dict(tensors),
        planner_data={name: tuple(name.split(".", 1)) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def test_torch_reads_what_it_would_have_written(url: str, tmp_path: Path) -> None:
    manifest = manifest_of(url, tmp_path)
    found = pickle.loads(dcp.describe(manifest))
    # As torch's own reader would get it: a pickle adds what a class does not keep.
    expected = pickle.loads(pickle.dumps(described_by_torch(manifest)))
    assert found == expected
    for name, tensor in expected.state_dict_metadata.items():
        theirs, ours = tensor.properties, found.state_dict_metadata[name].properties
        assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    stored = (tmp_path / "store/job-1/step-00000004.1/.metadata").read_bytes()
    assert stored == dcp.describe(manifest)


def test_one_layout_has_one_description(url: str, tmp_path: Path) -> None:
    manifest = manifest_of(url, tmp_path)
    describer = Describer()
    later = dataclasses.replace(
        manifest,
        step=5,
        parts=tuple(dataclasses.replace(part, step=5) for part in manifest.parts),
    )
    assert describer.description(manifest) is describer.description(later)


def test_a_coordinator_that_comes_after_leaves_a_manifest_and_what_it_names(
    url: str, tmp_path: Path
) -> None:
    """The one before wrote the manifest and died."""
    manifest = manifest_of(url, tmp_path)
    storage = Storage(url)
    storage.delete_file("commits/00000004.json")
    for part in manifest.parts:
        storage.write_bytes("step-00000004.1/parts/rank-00000.json", part.to_json())
    coordinator = Coordinator(storage, [0], commit_rules(timeout_s=DEADLINE_S))
    coordinator.adopt()
    assert [type(news).__name__ for news in coordinator.poll()] == ["Committed"]
    assert storage.read_commit(4)[1] == manifest
    load_alone(storage, 4, make_tensors(9))
