"""Text to ids, by a library: bytes are built in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.tokens.manifest import BYTE
from trainer.data.corpus import sentencepiece_model, tiktoken_encoding, tiktoken_file
from trainer.data.corpus.tokenizer_type import ENDS, Tokenizer

# Of a folder, the first that it has.
_FILES = ("tokenizer.json", "tokenizer.model")
_CONFIG = "tokenizer_config.json"
ALLOWED = (
    "byte, the path of a tokenizer.json, of a SentencePiece model or of a folder with one, "
    f"{tiktoken_encoding.PREFIX}NAME for an encoding of tiktoken's, or "
    f"{' or '.join(f'{name}:FILE' for name in tiktoken_file.SCHEMES)} for a file of tiktoken's"
)


def load(name: str, num_threads: int = 1) -> Tokenizer:
    """The tokenizer of a name as `--tokenizer` takes it; `docs/how-to/prepare-a-corpus.md` has all.

    `num_threads` is of `encode_all`; the library of a tokenizer.json has a variable for it.

    Raises:
        ValueError: there is none, its file is damaged, how it splits text is not known, or the
            library is not installed.
    """
    if name == BYTE:
        return Tokenizer(
            name=name,
            vocab_size=256,
            end_of_document=None,
            encode=_bytes,
            encode_all=lambda texts: [_bytes(text) for text in texts],
            decode=_text,
        )
    if name.startswith(tiktoken_encoding.PREFIX):
        return tiktoken_encoding.load(name, num_threads)
    scheme, path = _parted(name)
    if not path.is_file():
        raise ValueError(f"tokenizer {name!r}: no such file; allowed: {ALLOWED}")
    try:
        is_tiktoken = scheme is not None or tiktoken_file.is_one(path)
    except OSError as error:
        raise ValueError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    if is_tiktoken:
        return tiktoken_file.load(scheme, path, num_threads)
    if path.suffix == ".model":
        return sentencepiece_model.load(path, num_threads)
    return _of_json(name, path)


def absolute(name: str) -> str:
    """The same name, in a way that means the same in any folder."""
    if name == BYTE or name.startswith(tiktoken_encoding.PREFIX):
        return name
    scheme, path = _parted(name)
    return f"{scheme}:{path.resolve()}" if scheme else str(path.resolve())


def stamp(name: str) -> tuple[tuple[int, int], ...]:
    """Sizes of the files of a tokenizer and when they were written: others are another one."""
    if name == BYTE or name.startswith(tiktoken_encoding.PREFIX):
        return ()
    path = _parted(name)[1]
    files = [*_files_of(name), *([path.with_name(_CONFIG)] if path.name == _FILES[0] else [])]
    stats = [each.stat() for each in files if each.is_file()]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


def digest(name: str) -> str:
    """Tells tokenizers of files from each other, wherever the files lie; "" for one without."""
    if name == BYTE or name.startswith(tiktoken_encoding.PREFIX):
        return ""
    found = hashlib.sha256((_parted(name)[0] or "").encode())
    for each in _files_of(name):
        if each.is_file():
            found.update(each.read_bytes())
    return found.hexdigest()


def file_in(folder: Path) -> Path | None:
    """The file of a folder that has its tokenizer; None if there is none."""
    found = (folder / each for each in _FILES if (folder / each).is_file())
    return next(found, None)


def _files_of(name: str) -> tuple[Path, ...]:
    _, path = _parted(name)
    return path, path.with_name(f"{path.name}{tiktoken_file.BESIDE}")


def _parted(name: str) -> tuple[str | None, Path]:
    """How the text is split where the name says it, and the file."""
    scheme, colon, rest = name.partition(":")
    is_scheme = bool(colon) and scheme in tiktoken_file.SCHEMES
    path = Path(rest if is_scheme else name).expanduser()
    if path.is_dir():
        path = file_in(path) or path / _FILES[0]
    return scheme if is_scheme else None, path


def _of_json(name: str, path: Path) -> Tokenizer:
    library = _opened(name, path)
    own = _named_end(path)
    # Of a model for chats, what ends an answer is not what ends a document; and `</s>` may be a tag
    # of HTML in the tokenizer of a model whose documents end otherwise.
    named = [*(each for each in own if each in ENDS), *ENDS, *own]
    ends = [found for each in named if (found := library.token_to_id(each)) is not None]

    def encode(text: str) -> NDArray[Any]:
        # Training adds nothing but the end of a document.
        return np.array(library.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        # Without the place of each token in the text.
        found = library.encode_batch_fast(list(texts), add_special_tokens=False)
        # Each look at `ids` makes the list.
        return [np.fromiter(ids, np.int32, len(ids)) for ids in (each.ids for each in found)]

    return Tokenizer(
        name=str(path.resolve()),
        # Ids may have gaps, and then there are fewer than the largest says.
        vocab_size=max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        end_of_document=ends[0] if ends else None,
        encode=encode,
        encode_all=encode_all,
        decode=lambda ids: str(library.decode(list(ids))),
    )


def _named_end(path: Path) -> list[str]:
    """What the file beside a tokenizer.json says that a text ends with."""
    beside = path.with_name(_CONFIG)
    if path.name != _FILES[0] or not beside.is_file():
        return []
    try:
        end = json.loads(beside.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"tokenizer {beside}: {error}") from error
    # Older files have all that there is to say of the token.
    end = end.get("content") if isinstance(end, dict) else end
    return [end] if isinstance(end, str) else []


def _opened(name: str, path: Path) -> Any:
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
