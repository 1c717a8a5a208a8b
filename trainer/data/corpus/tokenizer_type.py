"""What every tokenizer can do, whatever library it is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

# What tokenizers in use call the end of a document, most widespread first.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
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
    """Text of ids; those of special tokens, and of none, are left out."""

    @property
    def token_type(self) -> str:
        """The smallest type that Megatron-LM has for its ids."""
        return "uint16" if self.vocab_size <= _MAX_UINT16 else "int32"
