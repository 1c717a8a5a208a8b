"""Joining pairs of tokens and index to one, in memory that does not grow with their documents."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.index import (
    read_header,
    read_index,
    stream_documents,
    stream_lengths,
    write_index,
)

_COPY_BYTES = 1 << 22


def join_pairs(pairs: Sequence[Path], name: Path, token_type: str) -> bool:
    """Write the documents of all `pairs`, in their order, as one; False if they have none.

    Raises:
        ValueError: an index is damaged.
        OSError: a file cannot be read or written.
    """
    filled = [pair for pair in pairs if _tokens_of(pair).stat().st_size]
    if not filled:
        return False
    num_sequences, num_documents = 0, 0
    with _tokens_of(name).open("wb") as joined:
        for pair in filled:
            index = read_index(_index_of(pair))
            num_sequences += len(index.lengths)
            num_documents += index.num_documents
            with _tokens_of(pair).open("rb") as part:
                shutil.copyfileobj(part, joined, _COPY_BYTES)
        joined.flush()
        os.fsync(joined.fileno())
    write_index(
        _index_of(name),
        token_type=token_type,
        num_sequences=num_sequences,
        num_documents=num_documents,
        lengths=lambda: _lengths(filled),
        documents=_documents(filled),
    )
    return True


def _lengths(pairs: Sequence[Path]) -> Iterator[NDArray[np.int32]]:
    for pair in pairs:
        yield from stream_lengths(_index_of(pair))


def _documents(pairs: Sequence[Path]) -> Iterator[NDArray[Any]]:
    num_before = 0
    for pair in pairs:
        for firsts in stream_documents(_index_of(pair)):
            yield firsts + num_before
        num_before += read_header(_index_of(pair)).num_sequences


def _tokens_of(pair: Path) -> Path:
    return pair.with_name(f"{pair.name}.bin")


def _index_of(pair: Path) -> Path:
    return pair.with_name(f"{pair.name}.idx")
