"""Ids beyond the vocabulary, wherever in a file they are.

Before a start files without a manifest are looked into by samples, as all of a large one takes
minutes to read. Training looks at what it reads, and `outlast data show --check` at everything.
"""

from __future__ import annotations

from typing import Final

from outlast.tokens.token_file import TokenFile

# 16 MiB of the usual 4 bytes: long reads, and little memory.
_TOKENS_AT_ONCE: Final = 2**22


def first_beyond(file: TokenFile, vocab_size: int) -> tuple[int, int] | None:
    """The place of the first token whose id is none of the vocabulary, and the id.

    Reads the file until then. Places count from 0.
    """
    tokens = file.tokens()
    for first in range(0, file.num_tokens, _TOKENS_AT_ONCE):
        part = tokens[slice(first, min(file.num_tokens, first + _TOKENS_AT_ONCE))]
        if int(part.min()) < 0 or int(part.max()) >= vocab_size:
            at = int(((part < 0) | (part >= vocab_size)).argmax())
            return first + at, int(part[at])
    return None


def beyond_vocabulary(name: str, place: int, found: int, vocab_size: int) -> str:
    """What is wrong with a file, in words, and what to do."""
    return (
        f"{name} has the id {found} as token {place} (counted from 0), beyond model.vocab_size = "
        f"{vocab_size}; allowed: 0 to {vocab_size - 1}. It was made with another tokenizer, or is "
        "damaged"
    )
