"""Files of tokens: what a path in `data.tokens` means, and whether it can be trained on.

It is a folder that `outlast data prepare` has made, a pair NAME.bin and NAME.idx in Megatron's
format (by the path of either or without an ending), or an array of numpy's in a `.npy` file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.index import Index, read_index
from outlast.tokens.manifest import NAME, read_manifest
from outlast.tokens.packing import Packing

# Of a file whose digest nobody has written down: enough to tell another one from it, and little
# enough to be read at every start.
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """One row of tokens in a file."""

    path: Path
    token_type: str
    offset_bytes: int
    num_tokens: int
    num_documents: int | None
    """None where nothing says where documents end."""
    has_prompts: bool = False
    """Whether the first sequence of each document is a prompt, which is not predicted."""

    def tokens(self) -> NDArray[Any]:
        """The tokens, mapped into memory."""
        kind = np.dtype(self.token_type).newbyteorder("<")
        size = (self.num_tokens,)
        return np.memmap(self.path, dtype=kind, mode="r", offset=self.offset_bytes, shape=size)

    def index(self) -> Index:
        """Where documents are, if `num_documents` says that it is known."""
        return read_index(self.path.with_name(f"{self.path.name.removesuffix('.bin')}.idx"))

    def packing(self, seq_len: int) -> Packing:
        """Whole documents in sequences, if `num_documents` says that it is known where they are.

        Raises:
            ValueError: documents do not lie one after the other.
        """
        return Packing(self.index(), row_tokens=seq_len + 1, has_prompts=self.has_prompts)

    def num_sequences(self, seq_len: int) -> int:
        """Of one stream of all documents. The last token of a sequence needs a successor."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def range_sampled(self) -> tuple[int, int]:
        """The smallest and the largest id of samples from all over the file."""
        tokens = self.tokens()
        parts = [tokens[part] for part in _samples(len(tokens))]
        return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """What `data.tokens` names: tokens to train on, and perhaps others to evaluate on."""

    name: str
    train: TokenFile
    validation: TokenFile | None
    vocab_size: int | None
    """That of the tokenizer; None where nothing says it."""
    tokenizer: str | None
    digest: str


def open_source(name: str) -> TokenSource:
    """The tokens at a path.

    Raises:
        ValueError: there are none, or their files do not belong together.
    """
    path = Path(name)
    try:
        if path.is_dir():
            return _of_folder(name, path)
        if path.suffix == ".npy":
            return _alone(name, _of_array(path))
        stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        return _alone(name, _of_pair(stem))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error


def _of_folder(name: str, folder: Path) -> TokenSource:
    manifest = read_manifest(folder)
    files = {}
    for split, said in manifest.splits.items():
        file = _of_pair(folder / split)
        if (file.num_tokens, file.num_documents) != (said.tokens, said.documents):
            raise ValueError(f"has another {split}.bin than its {NAME} says; prepare it again")
        files[split] = replace(file, has_prompts=manifest.has_prompts)
    return TokenSource(
        name=name,
        train=files["train"],
        validation=files.get("validation"),
        vocab_size=manifest.vocab_size,
        tokenizer=manifest.tokenizer,
        digest=manifest.digest,
    )


def _alone(name: str, file: TokenFile) -> TokenSource:
    return TokenSource(
        name=name,
        train=file,
        validation=None,
        vocab_size=None,
        tokenizer=None,
        digest=_digest(file),
    )


def _of_pair(stem: Path) -> TokenFile:
    index_path, path = (stem.with_name(stem.name + ending) for ending in (".idx", ".bin"))
    if not index_path.exists() and not path.exists():
        raise ValueError(
            f"is neither a folder of `outlast data prepare` nor a .npy file, and there are no "
            f"{path.name} and {index_path.name}"
        )
    for each, other in ((index_path, path), (path, index_path)):
        if not each.exists():
            raise ValueError(f"has {other.name} and no {each.name} beside it; copy both")
    try:
        index = read_index(index_path)
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from error
    size, item = path.stat().st_size, np.dtype(index.token_type).itemsize
    if size != index.num_bytes:
        raise ValueError(
            f"has {size:,} bytes of tokens in {path.name}, and {index_path.name} is of "
            f"{index.num_bytes:,}: one of them is truncated or of another corpus; copy both again"
        )
    return TokenFile(
        path=path,
        token_type=index.token_type,
        offset_bytes=0,
        num_tokens=size // item,
        num_documents=index.num_documents,
    )


def _of_array(path: Path) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"is no array that can be read: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or array.dtype.byteorder == ">":
        raise ValueError(
            f"is an array of {array.dtype} in {array.ndim} dimension(s); allowed: whole numbers "
            "in one"
        )
    if not len(array):
        # A file of no bytes cannot be mapped.
        raise ValueError("is an array of no tokens; give one with some")
    return TokenFile(
        path=path,
        token_type=array.dtype.name,
        offset_bytes=int(array.offset),
        num_tokens=len(array),
        num_documents=None,
    )


def _samples(count: int) -> Iterator[slice]:
    """Parts of a row of so many tokens: all of it if it is short, else the ends and between."""
    if count <= _NUM_SAMPLES * _SAMPLE_BYTES:
        yield slice(0, count)
        return
    for number in range(_NUM_SAMPLES):
        first = (count - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1)
        yield slice(first, first + _SAMPLE_BYTES)


def _digest(file: TokenFile) -> str:
    tokens = file.tokens()
    digest = hashlib.sha256(f"{file.token_type} {file.num_tokens}".encode())
    for part in _samples(file.num_tokens):
        digest.update(tokens[part].tobytes())
    return digest.hexdigest()
