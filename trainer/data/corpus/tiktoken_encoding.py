"""Encodings of tiktoken, by the library itself: those that it knows by name, and any other.

The library downloads what it has not in its cache. Here nothing is: a job has the same tokens on a
machine without a network, and none waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from trainer.data.corpus.extras import library
from trainer.data.corpus.tokenizer_type import ENDS, Tokenizer

PREFIX = "tiktoken:"
_lock = threading.Lock()
# Of a text that is named in a message.
_NUM_SHOWN = 40


def load(name: str, num_threads: int) -> Tokenizer:
    """The tokenizer `tiktoken:NAME` of the library, or of a plug-in of it, from its cache.

    Raises:
        ValueError: it has none of this name, its file is not in the cache, or the library is not
            installed.
    """
    package = library("tiktoken", "corpora", Path(name))
    encoding = name.removeprefix(PREFIX)
    known = package.list_encoding_names()
    if encoding not in known:
        raise ValueError(
            f"tokenizer {name!r}: tiktoken has no such encoding; allowed: {', '.join(known)}"
        )
    with _lock, _no_download(name):
        found = package.get_encoding(encoding)
    ends = [end for each in ENDS if (end := _special(found, each)) is not None]
    return of_encoding(name, found, ends[0] if ends else None, num_threads=num_threads)


def of_encoding(
    name: str,
    encoding: Any,
    end: int | None,
    *,
    num_threads: int,
    vocab_size: int | None = None,
    normal_form: str | None = None,
) -> Tokenizer:
    """A tokenizer that reads special tokens in a text as text.

    `vocab_size` is that of the encoding unless ids behind its own are special. `normal_form` is of
    Unicode, for models that have texts in one.
    """

    def prepared(text: str) -> str:
        return text if normal_form is None else normalize(normal_form, text)  # type: ignore[arg-type]  # It is one of four, as the caller has it.

    def encode(text: str) -> NDArray[Any]:
        with _named(name, [text]):
            return np.array(encoding.encode_ordinary(prepared(text)), dtype=np.int32)

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        with _named(name, texts):
            found = encoding.encode_ordinary_batch(
                [prepared(text) for text in texts], num_threads=num_threads
            )
        return [np.array(ids, dtype=np.int32) for ids in found]

    return Tokenizer(
        name=name,
        vocab_size=encoding.max_token_value + 1 if vocab_size is None else vocab_size,
        end_of_document=end,
        encode=encode,
        encode_all=encode_all,
        decode=lambda ids: b"".join(_bytes_of(encoding, ids)).decode(errors="replace"),
    )


def _special(encoding: Any, token: str) -> int | None:
    if token not in encoding.special_tokens_set:
        return None
    return int(encoding.encode_single_token(token))


def _bytes_of(encoding: Any, ids: Sequence[int]) -> Iterator[bytes]:
    for id in map(int, ids):
        if encoding.is_special_token(id):
            continue
        try:
            yield encoding.decode_single_token_bytes(id)
        except KeyError:
            # Vocabularies have holes, and that of a model may be larger.
            continue


@contextmanager
def _no_download(name: str) -> Iterator[None]:
    from tiktoken import load as files

    encoding = name.removeprefix(PREFIX)
    download = files.read_file

    def refuse(blobpath: str) -> bytes:
        if "://" not in blobpath:
            # A file of this machine, which a plug-in names.
            return bytes(download(blobpath))
        raise ValueError(
            f"tokenizer {name!r}: tiktoken's cache has no {blobpath}, and nothing is downloaded; "
            f'run python -c "import tiktoken; tiktoken.get_encoding({encoding!r})" with '
            "TIKTOKEN_CACHE_DIR on a machine with a network, and give that folder here in the same "
            "variable"
        )

    files.read_file = refuse
    try:
        yield
    finally:
        files.read_file = download


@contextmanager
def _named(name: str, texts: Sequence[str]) -> Iterator[None]:
    """Say which texts a library could not split: it gives up on a million blanks in a row."""
    try:
        yield
    except BaseException as error:
        # Panics of Rust are no exceptions for Python, and their class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        longest = max(texts, key=len)
        raise ValueError(
            f"tokenizer {name!r} cannot split a text of up to {len(longest):,} characters, the "
            f"longest beginning with {longest[:_NUM_SHOWN]!r}: {error}; shorten runs of hundreds "
            "of thousands of blanks or letters, or leave the document out"
        ) from error
