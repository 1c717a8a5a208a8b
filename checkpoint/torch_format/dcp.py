"""A checkpoint as `torch.distributed.checkpoint` sees it: the file `.metadata`.

With it beside our payloads, `torch.distributed.checkpoint.load` and
`python -m torch.distributed.checkpoint.format_utils dcp_to_torch` read the folder. It is
a pickle of torch's own classes, written here without them: agents do not import torch,
which takes seconds, and far more beside training that has every core.

Names become keys of two levels, as in `{"model": {...}, "optim": {...}}`.
"""

from __future__ import annotations

from checkpoint.core import pickled
from checkpoint.core.manifest import Manifest
from checkpoint.core.pickled import Called, Global, Instance, Items, Pairs, Value, fields
from checkpoint.core.shards import ShardTensor

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
# Layout and memory format of dense tensors, as torch's own class states them.
_STRIDED = Called(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Called(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_VERSION = "1.0.0"


def describe(manifest: Manifest) -> bytes:
    """The bytes of `.metadata` beside the payloads of this manifest."""
    shards: dict[str, list[ShardTensor]] = {}
    places: list[tuple[Value, Value]] = []
    for part in manifest.parts:
        for shard in part.tensors:
            shards.setdefault(shard.name, []).append(shard)
            index = fields(fqn=shard.name, offset=_size(shard.offsets), index=None)
            place = fields(
                relative_path=part.file, offset=shard.frame_offset, length=shard.frame_nbytes
            )
            places.append((_of("MetadataIndex", index), Instance(_STORAGE_INFO, place)))
    tensors = Pairs(tuple((name, _tensor(found)) for name, found in shards.items()))
    keys = Pairs(tuple((name, tuple(name.split(".", 1))) for name in shards))
    nowhere = fields(checkpoint_id=None, save_id=None, load_id=None, modules=Items(()))
    state = fields(
        state_dict_metadata=tensors,
        planner_data=keys,
        storage_data=Pairs(tuple(places)),
        storage_meta=_of("StorageMeta", nowhere),
        version=_VERSION,
    )
    return pickled.dumps(_of("Metadata", state))


def _tensor(shards: list[ShardTensor]) -> Instance:
    """A tensor of rectangles; what is not said of it here is that it needs no gradient."""
    first = shards[0]
    properties = (Global("torch", first.dtype), _STRIDED, False, _CONTIGUOUS, False)
    chunks = tuple(
        _of("ChunkStorageMetadata", fields(offsets=_size(one.offsets), sizes=_size(one.shape)))
        for one in shards
    )
    return _of(
        "TensorStorageMetadata",
        fields(
            properties=_of("TensorProperties", properties),
            size=_size(first.global_shape),
            chunks=Items(chunks),
        ),
    )


def _of(name: str, state: Value) -> Instance:
    return Instance(Global(_MODULE, name), state)


def _size(shape: tuple[int, ...]) -> Called:
    return Called(_SIZE, (shape,))
