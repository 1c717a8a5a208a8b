"""The manifest of a folder that `outlast data prepare` has made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "manifest.json"
# What has been tokenised of a folder that is not done.
PARTS = "parts"
FORMAT = "outlast-tokens/1"
# The tokenizer of bytes.
BYTE = "byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One pair of a `.bin` and an `.idx` file."""

    tokens: int
    documents: int
    sha256: str
    """Of the `.bin` file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a prepared folder holds and where it comes from."""

    tokenizer: str
    vocab_size: int
    """Of the tokenizer: all ids are below it."""
    token_type: str
    end_of_document: int | None
    """The id behind every document; None if there is none."""
    source: tuple[str, ...]
    digest: str
    """Of all splits together."""
    splits: dict[str, Split]
    tokenizer_digest: str = ""
    """Of its files, which may lie at another place elsewhere; empty where it has none, or of a
    folder from before it was noted."""
    has_prompts: bool = False
    """Whether the first sequence of each document is a prompt, which is not predicted."""

    def write(self, folder: Path) -> None:
        """Write it in one rename: a folder is complete when it has one."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2)
        partial = folder / f"{NAME}.partial"
        partial.write_text(text + "\n")
        partial.rename(folder / NAME)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        ValueError: there is none, or it is of another format.
        OSError: it cannot be read.
    """
    path = folder / NAME
    if not path.exists():
        if (folder / PARTS).exists():
            raise ValueError("is not done: give the same `outlast data prepare` again")
        raise ValueError(
            f"has no {NAME}: it is no folder of `outlast data prepare`, which makes one of text"
        )
    return parse_manifest(path.read_bytes())


def parse_manifest(raw: bytes) -> Manifest:
    """A manifest as it was written.

    Raises:
        ValueError: it is of another format.
    """
    try:
        document = json.loads(raw)
        if document.pop("format") != FORMAT:
            raise ValueError("another format")
        splits = {name: Split(**each) for name, each in document.pop("splits").items()}
        source = tuple(document.pop("source"))
        return Manifest(**document, source=source, splits=splits)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"has a {NAME} that is not of the format {FORMAT}") from error
