"""A state as `state_dict()` gives it: its tensors, and JSON text that says where each belongs.

Tensors go into checkpoints as they are. Of all else only what JSON can say is taken, in a form
that comes back as it was: nothing is pickled, so nothing that is read can run code. Small tensors
that are each rank's own stand behind the text: they may be of another size in the next state.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from checkpoint.stage.hostcopy import host_bytes

# Keys of JSON objects, each of which stands for a kind of value.
_DICT, _ORDERED, _LIST, _TUPLE, _SET, _BYTES, _FLOAT = "d", "o", "l", "t", "s", "b", "f"
_TENSOR, _ARRAY, _DTYPE, _SIZE = "T", "A", "y", "z"
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_PLAIN = frozenset({str, bool, int, type(None)})


# Larger ones are tensors of the checkpoint, and better keep their size.
INLINE_BYTES = 64 << 10


@dataclass(slots=True)
class Flat:
    """A state taken apart."""

    text: str = ""
    inline: bytearray = field(default_factory=bytearray)
    """The bytes of small tensors."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By the path that leads to each, such as `model.layers.0.weight`."""
    own: set[str] = field(default_factory=set)
    """Those of `tensors` of which each rank has its own."""
    is_own: bool = False
    """Whether each rank has its own of the state that is being taken apart."""


def flatten(states: Mapping[str, Any], own: Collection[str] = ()) -> Flat:
    """Take states apart, by their names; `own` are those of which each rank has its own.

    Raises:
        TypeError: something in them is neither a tensor nor what JSON can say; its path is named.
    """
    flat = Flat()
    document = {}
    for name, state in states.items():
        flat.is_own = name in own
        document[name] = _out(state, name, flat)
    # What has just been built has no circles; looking for them takes a third of the time.
    flat.text = json.dumps(document, separators=(",", ":"), check_circular=False)
    return flat


# The tensor of a path, of this shape and type.
TensorOf = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


def rebuild(text: str, inline: bytes, tensor_of: TensorOf) -> dict[str, Any]:
    """The states that `flatten` took apart."""
    document: dict[str, Any] = json.loads(text)
    source = _Source(inline, tensor_of)
    return {name: _in(state, source) for name, state in document.items()}


def tensor_paths(text: str, inline: bytes) -> list[str]:
    """The paths of all tensors that are not inline."""
    paths: list[str] = []

    def noted(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        paths.append(path)
        return torch.zeros(shape, dtype=dtype)

    rebuild(text, inline, noted)
    return paths


def _out(value: Any, path: str, flat: Flat) -> Any:
    if isinstance(value, Tensor):
        return {_TENSOR: _put(value, path, flat)}
    kind = type(value)
    # The most frequent ones first: a save takes thousands of values apart.
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {_DICT: _pairs(value, path, flat)}
    if isinstance(value, bool | str | int):
        # An enumeration, or a class of somebody's own: it would come back as another.
        raise _unknown(value, path)
    match value:
        case float():
            return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
        case bytes() | bytearray():
            return {_BYTES: base64.b64encode(value).decode()}
        case torch.Size():
            return {_SIZE: list(value)}
        case torch.dtype():
            return {_DTYPE: _dtype_name(value)}
        case Mapping():
            name = _ORDERED if isinstance(value, OrderedDict) else _DICT
            return {name: _pairs(value, path, flat)}
        case list() | tuple() | set() | frozenset():
            name = _kind_of(value, path)
            return {name: [_out(each, f"{path}.{index}", flat) for index, each in enumerate(value)]}
    return _number(value, path, flat)


def _pairs(value: Mapping[Any, Any], path: str, flat: Flat) -> list[Any]:
    return [
        [key if type(key) in _PLAIN else _wrong_key(key, path), _out(each, f"{path}.{key}", flat)]
        for key, each in value.items()
    ]


def _kind_of(value: object, path: str) -> str:
    kinds: dict[type, str] = {list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _SET}
    kind = kinds.get(type(value))
    if kind is None:
        raise _unknown(value, path)
    return kind


def _number(value: Any, path: str, flat: Flat) -> Any:
    """What numpy has, which need not be there."""
    if type(value).__module__ != "numpy" or not hasattr(value, "dtype") or value.dtype.hasobject:
        raise _unknown(value, path)
    if value.shape == ():
        # Python's own number is as good.
        return _out(value.item(), path, flat)
    raw = bytearray(value.tobytes())
    tensor = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte()
    return {_ARRAY: [_put(tensor, path, flat), value.dtype.str, list(value.shape)]}


def _put(tensor: Tensor, path: str, flat: Flat) -> Any:
    """Keep a tensor; what stands for it in the text: where it is, its shape and type."""
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or dtype in _QUANTIZED or tensor.is_meta:
        raise TypeError(
            f"{path} is a {tensor.layout} tensor of {dtype} on {tensor.device}; only dense "
            "tensors with values can be saved"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    about = [list(tensor.shape), _dtype_name(dtype)]
    if flat.is_own and tensor.nbytes <= INLINE_BYTES and tensor.is_cpu:
        begin = len(flat.inline)
        flat.inline += host_bytes(tensor.resolve_conj().resolve_neg().contiguous())
        return [begin, *about]
    name = path
    while name in flat.tensors:
        # A key may itself have a dot.
        name += "'"
    if flat.is_own:
        flat.own.add(name)
    flat.tensors[name] = tensor
    return [name, *about]


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wrong_key(key: object, path: str) -> NoReturn:
    raise TypeError(f"{path} has the key {key!r}; allowed: strings and whole numbers")


def _unknown(value: object, path: str) -> TypeError:
    return TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; a state may hold "
        "tensors, arrays, numbers, strings, bytes, None, and lists, tuples, sets and mappings of "
        "these. Give state_dict and load_state_dict that turn it into them"
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the tensors of a text are."""

    inline: bytes
    tensor_of: TensorOf

    def tensor(self, content: Any) -> Tensor:
        where, shape, name = content
        dtype: torch.dtype = getattr(torch, name)
        if isinstance(where, str):
            return self.tensor_of(where, tuple(shape), dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        raw = bytearray(self.inline[where : where + num_bytes])
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    def array(self, content: Any) -> Any:
        import numpy as np

        place, dtype, shape = content
        raw = bytes(host_bytes(self.tensor(place)))
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()


def _in(document: Any, source: _Source) -> Any:
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    match kind:
        case "T":
            return source.tensor(content)
        case "A":
            return source.array(content)
        case "d" | "o":
            pairs = [(key, _in(each, source)) for key, each in content]
            return OrderedDict(pairs) if kind == _ORDERED else dict(pairs)
        case "l":
            return [_in(each, source) for each in content]
        case "t":
            return tuple(_in(each, source) for each in content)
        case "s":
            return {_in(each, source) for each in content}
        case "b":
            return base64.b64decode(content)
        case "f":
            return float(content)
        case "z":
            return torch.Size(content)
        case "y":
            return getattr(torch, content)
    raise ValueError(f"a state has a value of the unknown kind {kind!r}")
