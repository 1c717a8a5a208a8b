"""Files of the safetensors format: a length, a JSON header, and the bytes of tensors.

Source: https://github.com/huggingface/safetensors, section "Format". A header comes from outside:
what it says is checked before a byte is read by it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint.hf.errors import DamagedFolderError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A file of tensors, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DamagedFolderError: the file is missing, or is not what it should be.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DamagedFolderError(f"{path}: {error}") from error
        try:
            self._places = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFolderError(f"{path}: not a whole file of safetensors: {error}") from error

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def read(self, name: str) -> Tensor:
        """One tensor, in the memory of the file, which nobody may write to."""
        place, dtype = self._places[name], self._dtype(name)
        if place.start == place.stop:
            return torch.empty(place.shape, dtype=dtype)
        raw = np.frombuffer(self._map, np.uint8, place.stop - place.start, place.start)
        if place.start % dtype.itemsize:
            raw = raw.copy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(raw).view(dtype).view(place.shape)

    def outline(self, name: str) -> Tensor:
        """A tensor of the same type and shape without memory."""
        return torch.empty(self._places[name].shape, dtype=self._dtype(name), device="meta")

    def _dtype(self, name: str) -> torch.dtype:
        given = self._places[name].dtype
        if given not in _DTYPES:
            raise DamagedFolderError(
                f"{self._path}: {name} is of type {given}; allowed: {', '.join(_DTYPES)}"
            )
        return _DTYPES[given]

    def close(self) -> None:
        # Where tensors of it are still held, as by the traceback of an error, it goes with them.
        with suppress(BufferError):
            self._map.close()

    def _read_header(self) -> dict[str, _Place]:
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        begin = _LENGTH_BYTES + length
        if length > _MAX_HEADER_BYTES or begin > len(self._map):
            raise ValueError(f"its header would have {length} bytes")
        header: dict[str, Any] = json.loads(self._map[_LENGTH_BYTES:begin])
        places = {}
        for name, entry in header.items():
            if name == _METADATA:
                continue
            start, stop = (begin + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            if not begin <= start <= stop <= len(self._map):
                raise ValueError(f"{name} lies beyond its end")
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
                raise ValueError(f"{name} of shape {shape} has {stop - start} bytes")
            places[name] = _Place(entry["dtype"], shape, start, stop)
        return places


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors, whole or not at all."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    raw = json.dumps(header).encode()
    # Tensors then begin where their largest items may lie.
    raw += b" " * (-len(raw) % _LENGTH_BYTES)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
