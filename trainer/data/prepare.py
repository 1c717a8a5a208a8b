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
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from outlast.rules.data import PYTHON_STDLIB, block_tokens
from outlast.sources import Source, survey

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What decides the content of the token files."""

    source: str
    tokenizer: str
    validation_fraction: float
    max_bytes: int


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
        ValueError: the source does not exist or holds no text.
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
    tokens = np.frombuffer(b"".join(_read(source)), dtype=np.uint8)
    if len(tokens) == 0:
        raise ValueError(f"data.source {options.source!r} holds no text")
    held_out = _held_out(len(tokens), options.validation_fraction)
    train, validation = tokens[~held_out], tokens[held_out]
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    train.tofile(partial / "train.bin")
    validation.tofile(partial / "validation.bin")
    meta = {
        "digest": hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest(),
        "dtype": "uint8",
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "left_out": source.left_out(),
    }
    (partial / "meta.json").write_text(json.dumps(meta))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _read(source: Source) -> Iterator[bytes]:
    left = source.max_bytes
    for path in source.files:
        if left <= 0:
            return
        text = path.read_bytes()[:left]
        left -= len(text)
        yield text


def _held_out(num_tokens: int, fraction: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Marks every token of the blocks that training must not see."""
    blocks = np.arange(num_tokens) // block_tokens(num_tokens, fraction)
    held_out: np.ndarray[tuple[int], np.dtype[np.bool_]]
    held_out = np.floor((blocks + 1) * fraction) > np.floor(blocks * fraction)
    return held_out
