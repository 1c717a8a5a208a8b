"""One row of tokens in a file, on this machine or in a store, and a source that has one or two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.id_range import IdRange, parse_note
from outlast.tokens.index import Index, read_index
from outlast.tokens.manifest import NAME, Manifest
from outlast.tokens.packing import Packing
from outlast.tokens.remote_file import RemoteFile, RemoteTokens

# Of a file whose digest nobody has written down: enough to tell another one from it, and little
# enough to be read at every start.
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """One row of tokens in a file."""

    name: str
    """Its path or URL."""
    token_type: str
    offset_bytes: int
    num_tokens: int
    num_documents: int | None
    """None where nothing says where documents end."""
    has_prompts: bool = False
    """Whether the first sequence of each document is a prompt, which is not predicted."""
    remote: RemoteFile | None = None
    """What reads it, where it is in a store."""
    remote_index: RemoteFile | None = None

    def tokens(self) -> NDArray[Any] | RemoteTokens:
        """The tokens: mapped into memory, or read from the store where they are there."""
        kind = np.dtype(self.token_type).newbyteorder("<")
        if self.remote is not None:
            return RemoteTokens(self.remote, kind, self.offset_bytes, self.num_tokens)
        size = (self.num_tokens,)
        return np.memmap(self.name, dtype=kind, mode="r", offset=self.offset_bytes, shape=size)

    def index(self) -> Index:
        """Where documents are, if `num_documents` says that it is known."""
        if self.remote_index is None:
            return read_index(Path(f"{self.name.removesuffix('.bin')}.idx"))
        return read_index(self.remote_index.whole(), name=self.remote_index.url)

    def packing(self, seq_len: int) -> Packing:
        """Whole documents in sequences, if `num_documents` says that it is known where they are.

        Raises:
            ValueError: documents do not lie one after the other.
        """
        return Packing(self.index(), row_tokens=seq_len + 1, has_prompts=self.has_prompts)

    def num_sequences(self, seq_len: int) -> int:
        """Of one stream of all documents. The last token of a sequence needs a successor."""
        return max(0, (self.num_tokens - 1) // seq_len)

    @property
    def nbytes(self) -> int:
        """Of the tokens."""
        return self.num_tokens * np.dtype(self.token_type).itemsize

    def sampled(self) -> list[NDArray[Any]]:
        """Samples from all over the file."""
        tokens, parts = self.tokens(), list(_samples(self.num_tokens))
        if isinstance(tokens, RemoteTokens):
            return tokens.ranges_of(parts)
        return [tokens[part] for part in parts]

    def digest_sampled(self) -> str:
        """Tells the file from others, by samples from all over it."""
        digest = hashlib.sha256(f"{self.token_type} {self.num_tokens}".encode())
        for part in self.sampled():
            digest.update(part.tobytes())
        return digest.hexdigest()


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
    tokenizer_digest: str = ""
    """Of the tokenizer's files, where they are known."""
    ids: IdRange | None = None
    """As `outlast data describe` has noted it; None where it has not, or of another file."""


def alone(name: str, file: TokenFile, note: bytes | None) -> TokenSource:
    """A source of one file without a manifest; `note` is what is beside it about its ids."""
    digest = file.digest_sampled()
    return TokenSource(
        name=name,
        train=file,
        validation=None,
        vocab_size=None,
        tokenizer=None,
        digest=digest,
        ids=None if note is None else parse_note(note, digest),
    )


def prepared(
    name: str, manifest: Manifest, pair_of: Callable[[str], TokenFile], *, remedy: str
) -> TokenSource:
    """A folder of `outlast data prepare`; `pair_of` opens one of its splits.

    Raises:
        ValueError: a split is not what the manifest says.
    """
    files = {}
    for split, said in manifest.splits.items():
        file = pair_of(split)
        if (file.num_tokens, file.num_documents) != (said.tokens, said.documents):
            raise ValueError(f"has another {split}.bin than its {NAME} says; {remedy}")
        files[split] = replace(file, has_prompts=manifest.has_prompts)
    return TokenSource(
        name=name,
        train=files["train"],
        validation=files.get("validation"),
        vocab_size=manifest.vocab_size,
        tokenizer=manifest.tokenizer,
        digest=manifest.digest,
        tokenizer_digest=manifest.tokenizer_digest,
    )


def check_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ValueError unless an array is a row of token ids."""
    if len(shape) != 1 or dtype.kind not in "ui" or dtype.byteorder == ">":
        raise ValueError(
            f"is an array of {dtype} in {len(shape)} dimension(s); allowed: whole numbers in one"
        )
    if not shape[0]:
        # A file of no bytes cannot be mapped.
        raise ValueError("is an array of no tokens; give one with some")


def check_sizes(name: str, index_name: str, *, size: int, expected: int) -> None:
    """Raise ValueError unless a `.bin` file has as many bytes as its index says."""
    if size != expected:
        raise ValueError(
            f"has {size:,} bytes of tokens in {name}, and {index_name} is of "
            f"{expected:,}: one of them is truncated or of another corpus; copy both again"
        )


def _samples(count: int) -> Iterator[slice]:
    """Parts of a row of so many tokens: all of it if it is short, else the ends and between."""
    if count <= _NUM_SAMPLES * _SAMPLE_BYTES:
        yield slice(0, count)
        return
    for number in range(_NUM_SAMPLES):
        first = (count - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1)
        yield slice(first, first + _SAMPLE_BYTES)
