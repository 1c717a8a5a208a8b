"""Small files of tokens for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outlast.tokens.manifest import Manifest, Split
from outlast.tokens.writer import TokenWriter


def write(name: Path, documents: Sequence[Sequence[int]], token_type: str = "uint16") -> Path:
    """A pair NAME.bin and NAME.idx; gives NAME."""
    name.parent.mkdir(parents=True, exist_ok=True)
    writer = TokenWriter(name, token_type)
    for document in documents:
        writer.add(np.array(document))
    writer.close()
    return name


def counted(count: int, *, first: int = 0, vocab_size: int = 256) -> list[int]:
    """Ids that tell where they are."""
    return [(first + place) % vocab_size for place in range(count)]


def prepared(folder: Path, splits: dict[str, list[list[int]]], vocab_size: int = 256) -> Path:
    """A folder as `outlast data prepare` makes it."""
    found = {}
    for name, documents in splits.items():
        write(folder / name, documents)
        content = (folder / f"{name}.bin").read_bytes()
        found[name] = Split(
            tokens=sum(map(len, documents)),
            documents=len(documents),
            sha256=hashlib.sha256(content).hexdigest(),
        )
    Manifest(
        tokenizer="byte",
        vocab_size=vocab_size,
        token_type="uint16",
        end_of_document=None,
        source=("somewhere",),
        digest=hashlib.sha256(repr(splits).encode()).hexdigest(),
        splits=found,
    ).write(folder)
    return folder
