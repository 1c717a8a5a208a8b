"""What lies where in a checkpoint that `torch.distributed.checkpoint` wrote, without torch.

Its `.metadata` is a pickle, and unpickling runs whatever a pickle names. Here it may name
the metadata's own classes and nothing else, and even those are stand-ins that only keep
what they are given: nothing in the file reaches code of anybody's.

What does not belong here: tensors (`convert.py`).
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from outlast.errors import FatalError

# Bytes of one item, of the types that a checkpoint of ours can hold.
ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class ForeignCheckpointError(FatalError):
    """A checkpoint of another program that we cannot or must not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignChunk:
    """A rectangle of a tensor, and which bytes of which file `torch.load` reads it from."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Of the tensor itself."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignMetadata:
    """All tensors of a checkpoint, and the names of what is in it besides."""

    chunks: tuple[ForeignChunk, ...]
    others: tuple[str, ...]


def parse_metadata(raw: bytes) -> ForeignMetadata:
    """What a `.metadata` file says.

    Raises:
        ForeignCheckpointError: it is damaged, or names what it has no business naming.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(raw)).load()
    except ForeignCheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise ForeignCheckpointError(f".metadata: {type(error).__name__}: {error}") from error
    metadata = _state(found, _Metadata)
    places = {
        (_text(index.get("fqn")), _shape(index.get("offset", ()))): _state(info, _StorageInfo)
        for key, info in _mapping(metadata.get("storage_data")).items()
        for index in (_state(key, _MetadataIndex),)
    }
    chunks: list[ForeignChunk] = []
    others = []
    for key, value in _mapping(metadata.get("state_dict_metadata")).items():
        name = _text(key)
        if isinstance(value, _TensorStorageMetadata):
            chunks += _chunks(name, _state(value, _TensorStorageMetadata), places)
        else:
            others.append(name)
    return ForeignMetadata(chunks=tuple(chunks), others=tuple(others))


def _chunks(
    name: str,
    tensor: Mapping[str, object],
    places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, object]],
) -> Iterator[ForeignChunk]:
    dtype = _dtype(name, tensor.get("properties"))
    listed = tensor.get("chunks")
    if not isinstance(listed, list):
        raise ForeignCheckpointError(f".metadata: tensor {name} has no list of chunks")
    for each in listed:
        chunk = _state(each, _ChunkStorageMetadata)
        offsets = _shape(chunk.get("offsets"))
        place = places.get((name, offsets))
        if place is None:
            raise ForeignCheckpointError(f".metadata: tensor {name} at {offsets} is in no file")
        if place.get("transform_descriptors"):
            raise ForeignCheckpointError(
                f".metadata: tensor {name} is stored under {place['transform_descriptors']}; "
                "save it again without compression or encryption"
            )
        start = _count(place.get("offset"))
        yield ForeignChunk(
            name=name,
            dtype=dtype,
            global_shape=_shape(tensor.get("size")),
            offsets=offsets,
            shape=_shape(chunk.get("sizes")),
            file=_file_name(place.get("relative_path")),
            start=start,
            stop=start + _count(place.get("length")),
        )


class _Kept:
    """Keeps the state that a pickle gives to an instance, and does nothing with it."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Metadata(_Kept):
    pass


class _TensorStorageMetadata(_Kept):
    pass


class _BytesStorageMetadata(_Kept):
    pass


class _ChunkStorageMetadata(_Kept):
    pass


class _TensorProperties(_Kept):
    pass


class _MetadataIndex(_Kept):
    pass


class _StorageMeta(_Kept):
    pass


class _StorageInfo(_Kept):
    pass


def _same(value: object) -> object:
    return value


def _member(owner: object, name: object) -> object:
    if owner is not _same:
        raise ForeignCheckpointError(
            f".metadata asks for {name} of {owner!r}, which a checkpoint's description has no use "
            "for; it is not read"
        )
    return name


def _joined(*parts: object) -> str:
    return "/".join(str(part) for part in parts)


def _size(items: tuple[object, ...] = ()) -> tuple[object, ...]:
    return items


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: Mapping[tuple[str, str], type[_Kept] | Callable[..., object] | str] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _TensorStorageMetadata,
    (_METADATA, "BytesStorageMetadata"): _BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): _ChunkStorageMetadata,
    (_METADATA, "TensorProperties"): _TensorProperties,
    (_METADATA, "MetadataIndex"): _MetadataIndex,
    (_METADATA, "StorageMeta"): _StorageMeta,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _same,
    # How some Pythons (3.11.2 is one) pickle a member of an enum; nothing is looked up.
    ("builtins", "getattr"): _member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _same,
    ("torch", "Size"): _size,
    # Where the checkpoint was written to, as a path of the system that wrote it.
    ("pathlib", "PosixPath"): _joined,
    ("pathlib", "WindowsPath"): _joined,
    ("pathlib._local", "PosixPath"): _joined,
    ("pathlib._local", "WindowsPath"): _joined,
    **{("torch", dtype): dtype for dtype in ITEM_BYTES},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ForeignCheckpointError(
                f".metadata names {module}.{name}, which a checkpoint's description has no use "
                "for; it is not read"
            ) from None


def _state(found: object, kind: type[_Kept]) -> Mapping[str, object]:
    if type(found) is not kind or not isinstance(found.state, dict):
        wanted, got = kind.__name__.lstrip("_"), type(found).__name__.lstrip("_")
        raise ForeignCheckpointError(f".metadata: a {got} where a {wanted} belongs")
    return found.state


def _mapping(value: object) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise ForeignCheckpointError(f".metadata: a {type(value).__name__} where a mapping belongs")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ForeignCheckpointError(f".metadata: {value!r} where a name belongs")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ForeignCheckpointError(f".metadata: {value!r} where a count belongs")
    return value


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise ForeignCheckpointError(f".metadata: {value!r} where a shape belongs")
    return tuple(_count(size) for size in value)


def _file_name(value: object) -> str:
    name = _text(value)
    # One that leads out of the checkpoint's folder would have us read other files.
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise ForeignCheckpointError(f".metadata: {name!r} is not a file of the checkpoint")
    return name


def _dtype(name: str, properties: object) -> str:
    state = properties.state if type(properties) is _TensorProperties else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ForeignCheckpointError(f".metadata: tensor {name} is of type {dtype!r}")
    return dtype
