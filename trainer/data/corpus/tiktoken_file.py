"""Files in tiktoken's format, as Llama 3 and Qwen have them: a token and its rank on each line.

Such a file does not say how text is split before tokens are merged, nor which special tokens
there are, and a wrong pattern gives other ids without an error. So both are said: by a name for the
models that published theirs, or by a file beside it. None is assumed.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.corpus.extras import library
from trainer.data.corpus.tiktoken_encoding import of_encoding
from trainer.data.corpus.tokenizer_type import ENDS, Tokenizer

# Beside FILE, FILE.json.
BESIDE = ".json"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
_SAMPLE_BYTES = 4096
_NUM_BYTES = 256
_MAX_ID = 2**31 - 1
# Letters, digits, marks, blanks and line ends, in several scripts: what a pattern must not lose.
_PROBE = "Ab's 12345 naïve été\t\N{SNOWMAN} 文字 नमस्ते?!\r\n\n  x_y\u00a0—\U0001f600 \x01 end "


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a model's own code has beside its file."""

    pattern: str
    num_special: int
    """Ids behind those of the file."""
    end: int
    """Which of them ends a document."""
    normal_form: str | None = None
    """Of Unicode, to which texts are brought before they are split."""


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SCHEMES = {
    # `llama/tokenizer.py` of meta-llama/llama3: <|end_of_text|> is the second of 256.
    "llama3": Scheme(pattern=rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", num_special=256, end=1),
    # `tokenization_qwen.py` of Qwen's models: <|endoftext|>, two for chats, 205 extras.
    "qwen": Scheme(pattern=rf"{_WORDS}|\p{{N}}|{_REST}", num_special=208, end=0, normal_form="NFC"),
}


def is_one(path: Path) -> bool:
    """Whether a file is in this format, which `tokenizer.model` may be as well as SentencePiece's.

    By its beginning, and not by its name alone; a file named .tiktoken is meant to be one.
    """
    if path.suffix == ".tiktoken":
        return True
    with path.open("rb") as file:
        return _LINE.match(file.read(_SAMPLE_BYTES)) is not None


def load(scheme: str | None, path: Path, num_threads: int) -> Tokenizer:
    """The tokenizer of a file whose text is split by `scheme`, or as the file beside it says.

    Raises:
        ValueError: neither says it, a file is damaged, or the library is not installed.
    """
    package = library("tiktoken", "corpora", path)
    beside = path.with_name(path.name + BESIDE)
    if scheme is None and not beside.is_file():
        choices = " or ".join(f"{name}:{path}" for name in SCHEMES)
        raise ValueError(
            f"tokenizer {path} is in tiktoken's format, which does not say how text is split; "
            f"allowed: {choices} for these models, or {beside} with pattern and special_tokens"
        )
    ranks = _ranks(path)
    special: dict[str, int] = {}
    if scheme is None:
        pattern, special = _beside(beside, ranks)
        size, normal_form = 1 + max(*ranks.values(), *special.values()), None
        end = next((special[each] for each in ENDS if each in special), None)
    else:
        chosen = SCHEMES[scheme]
        if set(ranks.values()) != set(range(len(ranks))):
            raise ValueError(
                f"tokenizer {path} has {len(ranks):,} ranks that are not 0 to {len(ranks) - 1:,}, "
                f"as {scheme} has them; it is truncated or of another model"
            )
        pattern, normal_form = chosen.pattern, chosen.normal_form
        size, end = len(ranks) + chosen.num_special, len(ranks) + chosen.end
    encoding = _built(package, pattern, ranks, special, where=path if scheme else beside)
    name = f"{scheme}:{path.resolve()}" if scheme else str(path.resolve())
    return of_encoding(
        name, encoding, end, num_threads=num_threads, vocab_size=size, normal_form=normal_form
    )


def _ranks(path: Path) -> dict[bytes, int]:
    """The id of each token.

    Raises:
        ValueError: naming the line that is damaged, or what is missing.
    """
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not _LINE.fullmatch(line + b"\n"):
            raise ValueError(
                f"tokenizer {path}, line {number:,}: is {line[:60]!r}; allowed: a token in base64, "
                "a blank and its rank, as tiktoken has them"
            )
        token, rank = line.split()
        try:
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"tokenizer {path}, line {number:,}: {error}") from error
    lacking = [byte for byte in range(_NUM_BYTES) if bytes([byte]) not in ranks]
    if lacking:
        raise ValueError(
            f"tokenizer {path} has no token of the byte 0x{lacking[0]:02x}, so not every text has "
            "ids; it is truncated or no file of tiktoken's"
        )
    if len(set(ranks.values())) < len(ranks) or max(ranks.values()) > _MAX_ID:
        raise ValueError(f"tokenizer {path} has a rank twice, or one beyond {_MAX_ID:,}")
    return ranks


def _beside(path: Path, ranks: dict[bytes, int]) -> tuple[str, dict[str, int]]:
    """Pattern and special tokens of the file beside the ranks.

    Raises:
        ValueError: saying which is wrong.
    """
    allowed = '{"pattern": REGULAR EXPRESSION, "special_tokens": {TOKEN: ID, ...}}'
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; allowed: {allowed}") from error
    match found:
        case {"pattern": str(pattern), "special_tokens": dict(special), **others} if not others:
            taken = set(ranks.values())
            for token, id in special.items():
                if type(id) is not int or not 0 <= id <= _MAX_ID or id in taken:
                    raise ValueError(
                        f"{path}: special_tokens: {token!r} is {id!r}; allowed: an integer from 0 "
                        "that is the id of no other token"
                    )
                taken.add(id)
            return pattern, special
        case _:
            raise ValueError(f"{path} has another content; allowed: {allowed}")


def _built(
    package: Any, pattern: str, ranks: dict[bytes, int], special: dict[str, int], *, where: Path
) -> Any:
    try:
        encoding = package.Encoding(
            str(where), pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        kept = encoding.decode(encoding.encode_ordinary(_PROBE))
    except ValueError as error:
        raise ValueError(f"{where}: pattern: {error}") from error
    if kept != _PROBE:
        raise ValueError(
            f"{where}: pattern: it leaves out characters, of {_PROBE!r} all but {kept!r}; allowed: "
            "one that matches all text"
        )
    return encoding
