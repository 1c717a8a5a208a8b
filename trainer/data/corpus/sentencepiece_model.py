"""SentencePiece models, as Llama 2, Gemma, Mistral and T5 have them, by the library itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.corpus.extras import library
from trainer.data.corpus.tokenizer_type import Tokenizer


def load(path: Path, num_threads: int) -> Tokenizer:
    """The tokenizer of a model's file; its end of a document is the model's end of a sentence.

    Raises:
        ValueError: it is damaged or of another format, or the library is not installed.
    """
    package = library("sentencepiece", "corpora", path)
    model = package.SentencePieceProcessor()
    try:
        # From memory: a file that cannot be read is then another error than a damaged one.
        model.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError as error:
        raise ValueError(
            f"tokenizer {path} is no SentencePiece model, or it is truncated: {error}"
        ) from error
    except OSError as error:
        raise ValueError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    # Control tokens in a text are text to the library; neither begin nor end is added.
    plain = {"out_type": int, "add_bos": False, "add_eos": False}

    def encode(text: str) -> NDArray[Any]:
        return np.array(model.encode(text, **plain), dtype=np.int32)

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        found = model.encode(list(texts), num_threads=num_threads, **plain)
        return [np.array(ids, dtype=np.int32) for ids in found]

    size, end = model.vocab_size(), model.eos_id()
    return Tokenizer(
        name=str(path.resolve()),
        vocab_size=size,
        # The library says -1 where a model has none.
        end_of_document=None if end < 0 else end,
        encode=encode,
        encode_all=encode_all,
        # A model's vocabulary may be padded to a round number, and then gives ids of no token.
        decode=lambda ids: str(model.decode([id for id in map(int, ids) if id < size])),
    )
