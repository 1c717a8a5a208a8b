"""Checksums of the blocks of a payload.

xxh3 runs at the speed of memory (27 GB/s here, zlib's crc32 at 4 to 7), so that what
verifies a block is never what takes the time. It finds damage, not forgery.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping

from checkpoint.core.manifest import CHECKSUMS

try:
    from xxhash import xxh3_64_intdigest
except ModuleNotFoundError:
    # Of a script whose interpreter is not ours.
    from checkpoint.xxh3 import xxh3_64_intdigest  # type: ignore[assignment]  # it takes no seed

CHECKSUM = CHECKSUMS[0]

_Bytes = bytes | bytearray | memoryview
_FUNCTIONS: Mapping[str, Callable[[_Bytes], int]] = {
    "xxh3_64": xxh3_64_intdigest,
    "crc32": zlib.crc32,
}
assert set(_FUNCTIONS) == set(CHECKSUMS)


def block_checksum(name: str, block: _Bytes) -> int:
    """The checksum of one block of a payload; `name` is one of `CHECKSUMS`."""
    return _FUNCTIONS[name](block)


def block_checksums(name: str, data: memoryview, block_bytes: int) -> Iterator[int]:
    """The checksums of `data`, which begins where a block begins."""
    for start in range(0, len(data), block_bytes):
        yield block_checksum(name, data[start : start + block_bytes])
