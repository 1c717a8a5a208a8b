"""What a copy and a write cost by themselves: memory to memory, and memory to disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Larger by far than any cache; a state of 4 GB and a copy of it do not both fit beside slots.
_MOST_WARM_BYTES = 1 << 30
_PIECE_BYTES = 32 << 20
_PAGE_BYTES = 4096


class WarmCopy:
    """Copies the bytes of tensors, one after another, into memory that is there already.

    Where there is less memory than bytes it begins again at its start.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        total = sum(tensor.nbytes for tensor in tensors)
        largest = max(tensor.nbytes for tensor in tensors)
        self._size = max(largest, min(total, _MOST_WARM_BYTES))
        self._warm = mmap.mmap(-1, self._size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._warm))
        ctypes.memset(self._address, 1, self._size)

    def copy(self) -> float:
        """Seconds that it took."""
        begin_s = time.perf_counter()
        place = 0
        for tensor in self._tensors:
            if place + tensor.nbytes > self._size:
                place = 0
            ctypes.memmove(self._address + place, tensor.data_ptr(), tensor.nbytes)
            place += tensor.nbytes
        return time.perf_counter() - begin_s


def torch_save(state: dict[str, Any], path: Path) -> float:
    """Seconds until the state is on disk under its name, the usual way."""
    begin_s = time.perf_counter()
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    return time.perf_counter() - begin_s


def write_past_cache(path: Path, source: memoryview, num_threads: int) -> float:
    """Seconds to write `source` to a new file with O_DIRECT, and to flush it.

    It begins at a page; what is left of the last one is not written.
    """
    starts = range(0, len(source) // _PAGE_BYTES * _PAGE_BYTES, _PIECE_BYTES)
    begin_s = time.perf_counter()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(partial(_write, handle, source), starts))
        os.fdatasync(handle)
    finally:
        os.close(handle)
    return time.perf_counter() - begin_s


def _write(handle: int, source: memoryview, start: int) -> None:
    # Direct writes are of whole pages.
    end = min(start + _PIECE_BYTES, len(source) // _PAGE_BYTES * _PAGE_BYTES)
    while start < end:
        start += os.pwrite(handle, source[start:end], start)
