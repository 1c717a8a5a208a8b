"""Which blocks of a file a range of it needs, and which blocks make room for others: arithmetic.

A file is cut into blocks of one size, the last may be shorter. What reads them, and where they are
kept, does not belong here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a range takes of one block: bytes `start` to `end`, counted from the block's first."""

    block: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file of the cache, and when it was last read."""

    name: str
    nbytes: int
    used_at_ns: int


def pieces(start: int, end: int, *, block_bytes: int) -> list[Piece]:
    """What bytes `start` to `end` of a file are put together from, in order."""
    found = []
    while start < end:
        block, inside = divmod(start, block_bytes)
        taken = min(end - start, block_bytes - inside)
        found.append(Piece(block=block, start=inside, end=inside + taken))
        start += taken
    return found


def bytes_of(block: int, *, size: int, block_bytes: int) -> tuple[int, int]:
    """First byte of a block of a file of `size`, and the one behind its last."""
    start = block * block_bytes
    return start, min(size, start + block_bytes)


def to_evict(kept: Sequence[KeptFile], *, limit_bytes: int) -> list[KeptFile]:
    """The least recently used files, as few as must go for the others to fit in `limit_bytes`."""
    excess = sum(each.nbytes for each in kept) - limit_bytes
    found: list[KeptFile] = []
    # By name where the clock does not tell them apart, so that the answer is one.
    for each in sorted(kept, key=lambda each: (each.used_at_ns, each.name)):
        if excess <= 0:
            break
        found.append(each)
        excess -= each.nbytes
    return found
