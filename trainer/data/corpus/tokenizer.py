"""Text to ids, by a library: bytes are built in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What tokenizers in use call it, most widespread first.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_MAX_UINT16 = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer that is ready to be used."""

    name: str
    vocab_size: int
    end_of_document: int | None
    encode: Callable[[str], NDArray[Any]]
    encode_all: Callable[[Sequence[str]], list[NDArray[Any]]]
    """The same of several texts, in a fraction of the time."""
    decode: Callable[[Sequence[int]], str]

    @property
    def token_type(self) -> str:
        """The smallest type that Megatron-LM has for its ids."""
        return "uint16" if self.vocab_size <= _MAX_UINT16 else "int32"


def load(name: str) -> Tokenizer:
    """`byte`, or the tokenizer in a tokenizer.json file or in the folder of one.

    Raises:
        ValueError: there is none, or the library is not installed.
    """
    if name == "byte":
        return Tokenizer(
            name=name,
            vocab_size=256,
            end_of_document=None,
            encode=_bytes,
            encode_all=lambda texts: [_bytes(text) for text in texts],
            decode=_text,
        )
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    library = _opened(name, path)
    ends = [found for each in _ENDS if (found := library.token_to_id(each)) is not None]

    def encode(text: str) -> NDArray[Any]:
        # Training adds nothing but the end of a document.
        return np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        # Without the place of each token in the text.
        found = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    return Tokenizer(
        name=str(path.resolve()),
        vocab_size=library.get_vocab_size(),
        end_of_document=ends[0] if ends else None,
        encode=encode,
        encode_all=encode_all,
        decode=lambda ids: str(library.decode(list(ids))),
    )


def _opened(name: str, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(
            f"tokenizer {name!r}: no such file; allowed: byte, or the path of a tokenizer.json"
        )
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise ValueError(
            f"tokenizer {name!r} needs the package tokenizers; pip install 'outlast[corpora]'"
        ) from error
    try:
        library = Library.from_file(str(path))
    except Exception as error:
        raise ValueError(f"tokenizer {path}: {error}") from error
    # Both are for inputs of a model in batches; documents are taken as they are.
    library.no_padding()
    library.no_truncation()
    return library


def _text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def _bytes(text: str) -> NDArray[Any]:
    return np.frombuffer(text.encode(), dtype=np.uint8)
