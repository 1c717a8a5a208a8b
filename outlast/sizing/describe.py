"""Sizes as people write them, and such that those that differ also look different."""

from __future__ import annotations

_GIB = 1 << 30


def in_words(size_bytes: int) -> str:
    """A size as people write it."""
    if size_bytes < _GIB // 10:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / _GIB:.1f} GiB"


def told_apart(*sizes_bytes: int) -> tuple[str, ...]:
    """Sizes that are compared: to the byte where different ones would read alike."""
    words = tuple(map(in_words, sizes_bytes))
    if len(set(words)) == len(set(sizes_bytes)):
        return words
    return tuple(f"{size:,} bytes" for size in sizes_bytes)
