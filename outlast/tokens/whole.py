"""Ids beyond the vocabulary, wherever in a file they are.

Before a start files without a manifest are read whole where that takes seconds. A larger one takes
minutes: `outlast data describe` has read it once, or data.check_ids lets samples do. Training looks
at what it reads in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from outlast.tokens.id_range import IdRange
from outlast.tokens.token_file import TokenFile

# 16 MiB of the usual 4 bytes: long reads, and little memory.
_TOKENS_AT_ONCE: Final = 2**22
# No token type has greater ids.
_MOST: Final = 2**64
# Of files that are read before each start of a job: under a second from memory, and some from a
# disk.
READ_WHOLE_BYTES: Final = 2**30
# Of those in a store: seconds over most networks.
FETCH_WHOLE_BYTES: Final = 2**26


def read_whole(files: Iterable[TokenFile]) -> frozenset[str]:
    """The names of those that are read whole before a start, nobody having noted their ids: the
    smallest ones, as many as take seconds together."""
    left = {True: READ_WHOLE_BYTES, False: FETCH_WHOLE_BYTES}
    names = set()
    for file in sorted(files, key=lambda file: file.nbytes):
        is_local = file.remote is None
        if file.nbytes <= left[is_local]:
            left[is_local] -= file.nbytes
            names.add(file.name)
    return frozenset(names)


def range_of(file: TokenFile, done: Callable[[int], None] = lambda num_bytes: None) -> IdRange:
    """The range of all ids; `done` is called with every so many bytes that were read."""
    smallest, largest, at = _MOST, -1, 0
    tokens = file.tokens()
    for first in range(0, file.num_tokens, _TOKENS_AT_ONCE):
        part = tokens[slice(first, min(file.num_tokens, first + _TOKENS_AT_ONCE))]
        smallest = min(smallest, int(part.min()))
        if (found := int(part.max())) > largest:
            largest, at = found, first + int((part == found).argmax())
        done(part.nbytes)
    return IdRange(smallest=smallest, largest=largest, largest_at=at)


def range_of_samples(file: TokenFile) -> IdRange:
    """The range of ids from all over a file."""
    parts = file.sampled()
    return IdRange(
        smallest=min(int(part.min()) for part in parts),
        largest=max(int(part.max()) for part in parts),
    )
