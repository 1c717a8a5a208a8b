"""The blocks of a slot's payload that have a checksum each.

What a rank owns is divided as the manifest divides it, so that the checksums of a slot are
those of its part in storage; the rest of the payload follows, divided alike.
"""

from __future__ import annotations

from checkpoint.core.manifest import BLOCK_BYTES


def num_blocks(payload_bytes: int, owned_bytes: int) -> int:
    """How many blocks a payload has."""
    return num_owned_blocks(owned_bytes) + -(-(payload_bytes - owned_bytes) // BLOCK_BYTES)


def num_owned_blocks(owned_bytes: int) -> int:
    """How many blocks of a payload, the first ones, go to storage."""
    return -(-owned_bytes // BLOCK_BYTES)


def blocks_of(payload_bytes: int, owned_bytes: int) -> list[tuple[int, int]]:
    """Start and end of every block, in bytes from the start of the payload, in order."""
    return [
        (start, min(start + BLOCK_BYTES, end))
        for begin, end in ((0, owned_bytes), (owned_bytes, payload_bytes))
        for start in range(begin, end, BLOCK_BYTES)
    ]
