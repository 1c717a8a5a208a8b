"""Turns a source of text into tokens on disk, once for all ranks of a node.

The result is two flat files of bytes, training and held-out, that ranks map
into memory. It lies in a folder named by a hash of the source and the options,
appears in one rename, and is built under a file lock by whoever comes first.

Blocks of text are held out at even distances over the whole source, so that
both splits hold the same kind of text, even when the source is one file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from outlast.rules.data import PYTHON_STDLIB, block_tokens
from outlast.sources import Source, check_block, survey

FORMAT_VERSION = 1
# Of the text that is in memory at once.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What decides the content of the token files."""

    source: str
    tokenizer: str
    validation_fraction: float
    max_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """A prepared data set. `digest` is over all tokens of both splits."""

    folder: Path
    digest: str
    train_tokens: int
    validation_tokens: int
    left_out: tuple[str, ...]
    """What of the source was not read, in words."""

    @property
    def train(self) -> Path:
        return self.folder / "train.bin"

    @property
    def validation(self) -> Path:
        return self.folder / "validation.bin"


def prepare(data_dir: Path, options: DataOptions) -> TokenFiles:
    """The token files for `options`, made now if `data_dir` does not have them yet.

    Raises:
        ValueError: the source does not exist, holds no text, or a file of it has something else
            behind its beginning.
    """
    folder = data_dir / _key(options)
    if not (folder / "meta.json").exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        with open(data_dir / f"{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "meta.json").exists():
                _build(folder, options)
    meta = json.loads((folder / "meta.json").read_text())
    return TokenFiles(
        folder=folder,
        digest=meta["digest"],
        train_tokens=meta["train_tokens"],
        validation_tokens=meta["validation_tokens"],
        # Files that an earlier version prepared do not say.
        left_out=tuple(meta.get("left_out", ())),
    )


def source_of(options: DataOptions) -> Source:
    """What the source holds here.

    Raises:
        ValueError: there is no such source, or it holds no text.
    """
    try:
        return survey(options.source, options.max_bytes)
    except ValueError as error:
        raise ValueError(f"data.source {options.source!r} {error}") from error


def _key(options: DataOptions) -> str:
    """Changes with the source, the options and the format."""
    facts: list[object] = [FORMAT_VERSION, asdict(options)]
    if options.source == PYTHON_STDLIB:
        # Walking the library on every restart would cost more than the rest of loading.
        facts.append([sys.version, sysconfig.get_path("stdlib")])
    else:
        for path in source_of(options).files:
            stat = path.stat()
            facts.append([str(path), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _build(folder: Path, options: DataOptions) -> None:
    source = source_of(options)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    train, validation = partial / "train.bin", partial / "validation.bin"
    with train.open("wb") as trained_on, validation.open("wb") as held_out:
        _write_splits(source, options, trained_on, held_out)
    meta = {
        "digest": _digest(train, validation),
        "dtype": "uint8",
        "train_tokens": train.stat().st_size,
        "validation_tokens": validation.stat().st_size,
        "left_out": source.left_out(),
    }
    (partial / "meta.json").write_text(json.dumps(meta))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _write_splits(
    source: Source, options: DataOptions, train: BinaryIO, validation: BinaryIO
) -> None:
    """Write every block of the text to one of two files; memory holds one piece of a block."""
    fraction = options.validation_fraction
    block = block_tokens(source.num_tokens, fraction)
    number, room = 0, block
    for piece in _read(source):
        while piece:
            is_held_out = math.floor((number + 1) * fraction) > math.floor(number * fraction)
            (validation if is_held_out else train).write(piece[:room])
            taken = min(room, len(piece))
            piece, room = piece[taken:], room - taken
            if not room:
                number, room = number + 1, block


def _read(source: Source) -> Iterator[memoryview]:
    left = source.num_tokens
    for path in source.files:
        at = 0
        with path.open("rb") as file:
            while left > 0 and (text := file.read(min(left, _PIECE_BYTES))):
                # The text that ships with Python is what it is.
                if source.name != PYTHON_STDLIB:
                    check_block(path, at, text)
                at += len(text)
                left -= len(text)
                yield memoryview(text)


def _digest(*files: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
