"""What makes the raw bytes of a tensor a file of torch's own format: what is around them.

torch writes a zip archive with the tensor's bytes, stored as they are, in the middle.
Everything else in it depends on type and shape only once its checksums are turned off, so
that a slot gets its frames when it is made and a save is a plain copy.

What does not belong here: where a frame lies in a payload (`core/shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import torch

# torch.save imports this at its first use. Imported here, it is paid before a worker is forked.
import torch.utils.serialization.config
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from checkpoint.core.shards import ALIGNMENT_BYTES

# torch's options are global to the process.
_options = Lock()


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after a tensor's own."""

    prefix: bytes
    suffix: bytes


# A model has far fewer shapes than tensors.
@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor of this type and shape."""
    # Never touched, so it takes no memory however large it is.
    tensor = torch.empty(shape, dtype=dtype)
    file = _SplitFile()
    with _options, _without_checksums(), skip_data():
        torch.save(tensor, file)  # type: ignore[arg-type]  # torch writes and seeks, no more
    if not tensor.numel():
        # Its bytes, all none of them, are at the beginning, where they are aligned.
        return Frame(prefix=b"", suffix=bytes(file.before))
    assert file.skipped == tensor.nbytes, "torch skips the tensor's bytes, and only those"
    assert len(file.before) % ALIGNMENT_BYTES == 0, "torch aligns the tensor's bytes"
    return Frame(prefix=bytes(file.before), suffix=bytes(file.after))


class _SplitFile:
    """Keeps what is written before and after the one hole that torch leaves."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after = bytearray()
        self.skipped = 0

    def write(self, data: memoryview) -> int:
        (self.after if self.skipped else self.before).extend(data)
        return len(data)

    def seek(self, count: int, whence: int) -> None:
        self.skipped += count

    def flush(self) -> None:
        """torch wants it; there is nothing to do."""


@contextmanager
def _without_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
