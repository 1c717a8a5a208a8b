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
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple, NoReturn

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


class _Leaf(NamedTuple):
    """A mapping that held tensors only when it was last taken apart."""

    looks: list[tuple[object, ...]]
    """The key, its type, the shape and the type of each."""
    names: list[str]
    text: str


Leaves = dict[str, _Leaf]
"""By their paths; the next state that is taken apart seldom differs in more than values."""


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
    known: Mapping[str, _Leaf] = field(default_factory=dict)
    """Leaves of an earlier state."""
    leaves: Leaves = field(default_factory=dict)


def flatten(
    states: Mapping[str, Any], own: Collection[str] = (), known: Leaves | None = None
) -> Flat:
    """Take states apart, by their names; `own` are those of which each rank has its own.

    `known` are the leaves of an earlier state, whichever it was.

    Raises:
        TypeError: something in them is neither a tensor nor what JSON can say; its path is named.
    """
    flat = Flat(known=known or {})
    texts = []
    for name, state in states.items():
        flat.is_own = name in own
        texts.append(f"{_quoted(name)}:{_text(state, name, flat)}")
    flat.text = "{" + ",".join(texts) + "}"
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


def _text(value: Any, path: str, flat: Flat) -> str:
    """The JSON text that stands for a value."""
    if isinstance(value, Tensor):
        return f'{{"{_TENSOR}":{_put(value, path, flat)}}}'
    kind = type(value)
    # The most frequent ones first: a save takes thousands of values apart.
    if kind in _PLAIN:
        return _plain(value)
    if kind is dict:
        return f'{{"{_DICT}":{_pairs(value, path, flat)}}}'
    if isinstance(value, bool | str | int):
        # An enumeration, or a class of somebody's own: it would come back as another.
        raise _unknown(value, path)
    match value:
        case float():
            number = float.__repr__(value)
            return number if math.isfinite(value) else f'{{"{_FLOAT}":"{number}"}}'
        case bytes() | bytearray():
            return f'{{"{_BYTES}":"{base64.b64encode(value).decode()}"}}'
        case torch.Size():
            return f'{{"{_SIZE}":{json.dumps(list(value))}}}'
        case torch.dtype():
            return f'{{"{_DTYPE}":"{_dtype_name(value)}"}}'
        case Mapping():
            name = _ORDERED if isinstance(value, OrderedDict) else _DICT
            return f'{{"{name}":{_pairs(value, path, flat)}}}'
        case list() | tuple() | set() | frozenset():
            texts = [_text(each, f"{path}.{index}", flat) for index, each in enumerate(value)]
            return f'{{"{_kind_of(value, path)}":[{",".join(texts)}]}}'
    return _number(value, path, flat)


def _plain(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _quoted(value)
    # Parameters have numbers in the states of optimizers.
    return int.__repr__(value) if kind is int else json.dumps(value)


def _pairs(value: Mapping[Any, Any], path: str, flat: Flat) -> str:
    looks = None if flat.is_own else _looks(value)
    leaf = flat.known.get(path)
    if leaf is not None and leaf.looks == looks and flat.tensors.keys().isdisjoint(leaf.names):
        flat.leaves[path] = leaf
        flat.tensors.update(zip(leaf.names, value.values(), strict=True))
        return leaf.text
    names = [f"{path}.{key}" for key in value]
    has_names = flat.tensors.keys().isdisjoint(names)
    texts = [
        f"[{_plain(key) if type(key) in _PLAIN else _wrong_key(key, path)},"
        f"{_text(each, name, flat)}]"
        for name, (key, each) in zip(names, value.items(), strict=True)
    ]
    text = f"[{','.join(texts)}]"
    if looks is not None and has_names and len(set(names)) == len(names):
        flat.leaves[path] = _Leaf(looks, names, text)
    return text


def _looks(value: Mapping[Any, Any]) -> list[tuple[object, ...]] | None:
    """All that the text of a mapping depends on; None where it holds more than plain tensors."""
    looks: list[tuple[object, ...]] = []
    for key, each in value.items():
        if type(each) is not Tensor or each.layout is not torch.strided:
            return None
        if each.requires_grad or each.is_meta:
            return None
        # As keys, 1 and True are equal.
        looks.append((key, type(key), each.shape, each.dtype))
    return looks


def _kind_of(value: object, path: str) -> str:
    kinds: dict[type, str] = {list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _SET}
    kind = kinds.get(type(value))
    if kind is None:
        raise _unknown(value, path)
    return kind


def _number(value: Any, path: str, flat: Flat) -> str:
    """What numpy has, which need not be there."""
    if type(value).__module__ != "numpy" or not hasattr(value, "dtype") or value.dtype.hasobject:
        raise _unknown(value, path)
    if value.shape == ():
        # Python's own number is as good.
        return _text(value.item(), path, flat)
    raw = bytearray(value.tobytes())
    tensor = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte()
    about = f"{_put(tensor, path, flat)},{_quoted(value.dtype.str)},{json.dumps(value.shape)}"
    return f'{{"{_ARRAY}":[{about}]}}'


def _put(tensor: Tensor, path: str, flat: Flat) -> str:
    """Keep a tensor; what stands for it in the text: where it is, its shape and type."""
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or dtype in _QUANTIZED or tensor.is_meta:
        raise TypeError(
            f"{path} is a {tensor.layout} tensor of {dtype} on {tensor.device}; only dense "
            "tensors with values can be saved"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    about = f'{json.dumps(tensor.shape)},"{_dtype_name(dtype)}"'
    if flat.is_own and tensor.nbytes <= INLINE_BYTES and tensor.is_cpu:
        begin = len(flat.inline)
        flat.inline += host_bytes(tensor.resolve_conj().resolve_neg().contiguous())
        return f"[{begin},{about}]"
    name = path
    while name in flat.tensors:
        # A key may itself have a dot.
        name += "'"
    if flat.is_own:
        flat.own.add(name)
    flat.tensors[name] = tensor
    return f"[{_quoted(name)},{about}]"


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
