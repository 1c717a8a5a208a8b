"""The text files of a data source: which are read, and what is left out."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast.rules.data import PYTHON_STDLIB, bytes_read

TEXT_SUFFIXES = (".py", ".txt", ".rst", ".md")
# Tests are half of the standard library and say little; caches are not text.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
# Names of what was left out, in words; more would not help a person.
_NUM_NAMED = 3
# What binary files begin with, and what to do about each.
_BEGINNINGS = {
    b"MMIDIDX": "an index of tokens; give it as data.tokens",
    b"\x93NUMPY": "an array of numpy's; give it as data.tokens if it has token ids",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip archive; decompress it",
    b"\x28\xb5\x2f\xfd": "a zstd archive; decompress it",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"%PDF": "a PDF; extract its text",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
# As far as git and grep look, too, to tell text from binary files.
_SAMPLE_BYTES = 8000
# Read before a job is taken, which takes 0.05 s; a rank reads the rest.
_READ_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
# Each file that is looked into costs a system call or three, at every submission.
_MAX_SAMPLED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a data source holds, as far as `max_bytes` reads it."""

    name: str
    files: tuple[Path, ...]
    """Text files in the order in which they are read."""
    nbytes: int
    """Of all of them together."""
    max_bytes: int | None
    """How much of it is read; None: all."""
    other_files: tuple[Path, ...]
    """Files that are not text by their suffix, so they are skipped."""
    folders: tuple[Path, ...]
    """Folders that are skipped because of their names."""

    @property
    def num_tokens(self) -> int:
        """Bytes are tokens."""
        return self.nbytes if self.is_whole else min(self.nbytes, self.max_bytes or 0)

    @property
    def num_documents(self) -> int:
        """Files of which something is read.

        Raises:
            OSError: one is gone.
        """
        if self.is_whole:
            return sum(path.stat().st_size > 0 for path in self.files)
        number, left = 0, self.num_tokens
        for path in self.files:
            if left <= 0:
                break
            size = path.stat().st_size
            number += size > 0
            left -= size
        return number

    @property
    def is_whole(self) -> bool:
        """Whether all of it is read."""
        return self.max_bytes is None or self.nbytes <= self.max_bytes

    def left_out(self) -> list[str]:
        """What is not read, in words, each with what to change."""
        found = []
        # The text that ships with Python is what it is.
        if self.name != PYTHON_STDLIB:
            if self.other_files:
                found.append(
                    f"{_counted(len(self.other_files), 'file')} of {self.name} skipped "
                    f"({_named(self.other_files)}): only {', '.join(TEXT_SUFFIXES)} are read"
                )
            if self.folders:
                found.append(
                    f"{_counted(len(self.folders), 'folder')} of {self.name} skipped "
                    f"({_named(self.folders)}): folders of these names are not read"
                )
        if not self.is_whole:
            # Nobody means to read all of the standard library.
            remedy = "" if self.name == PYTHON_STDLIB else "; data.max_bytes sets the limit"
            found.append(
                f"text cut at {self.num_tokens:,} of {self.nbytes:,} bytes of {self.name}{remedy}"
            )
        return found


def survey(source: str, max_bytes: int | None) -> Source:
    """What `source` holds here; `max_bytes` is that of the spec.

    Raises:
        ValueError: there is no such source, it cannot be read, or it holds no text.
    """
    max_bytes = bytes_read(source, max_bytes)
    if source == PYTHON_STDLIB:
        return _of_folder(source, Path(sysconfig.get_path("stdlib")), max_bytes)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            with os.scandir(path):
                return _of_folder(source, path, max_bytes)
        if path.is_file():
            _check_text(source, (path,))
            return _checked(
                Source(
                    name=source,
                    files=(path,),
                    nbytes=path.stat().st_size,
                    max_bytes=max_bytes,
                    other_files=(),
                    folders=(),
                )
            )
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if path.exists():
        raise ValueError("is neither a file nor a folder")
    raise ValueError(f"is neither {PYTHON_STDLIB!r} nor an existing file or folder")


def _of_folder(name: str, root: Path, max_bytes: int | None) -> Source:
    files: list[Path] = []
    others: list[Path] = []
    skipped: list[Path] = []
    for folder, folders, names in os.walk(root):
        skipped += [Path(folder) / each for each in folders if each in SKIPPED_FOLDERS]
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS]
        for each in names:
            path = Path(folder) / each
            (files if each.endswith(TEXT_SUFFIXES) else others).append(path)
    files.sort()
    if name != PYTHON_STDLIB:
        _check_text(name, files)
    return _checked(
        Source(
            name=name,
            files=tuple(files),
            nbytes=sum(path.stat().st_size for path in files),
            max_bytes=max_bytes,
            other_files=tuple(sorted(others)),
            folders=tuple(sorted(skipped)),
        )
    )


def _check_text(name: str, files: Sequence[Path]) -> None:
    """Refuse what would be trained on as bytes and is no text."""
    for path in files[:_MAX_SAMPLED]:
        with path.open("rb") as file:
            kind = _binary_kind(file.read(_SAMPLE_BYTES))
        if kind is not None:
            which = "is" if str(path) == name else f"holds {path.name}, which is"
            raise ValueError(f"{which} not text but {kind}")


def check_first(source: Source) -> None:
    """Refuse a source whose first 64 MiB, of what is read of it, are not all text.

    Raises:
        ValueError: naming the file, and the first zero byte.
        OSError: a file is gone, or cannot be read.
    """
    if source.name == PYTHON_STDLIB:
        return
    left = min(source.num_tokens, _READ_BYTES)
    for path in source.files[:_MAX_SAMPLED]:
        at = 0
        with path.open("rb") as file:
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                check_block(path, at, block)
                at += len(block)
                left -= len(block)
        if not left:
            return


def check_block(path: Path, at: int, block: bytes) -> None:
    """Refuse a part of a text file, read from byte `at` on, that is no text.

    `survey` looks into the beginnings of some files alone; this is for who reads on.

    Raises:
        ValueError: naming the file, and the first zero byte.
    """
    kind = _kind_by_beginning(block) if at == 0 else None
    if kind is None and (zero := block.find(b"\0")) >= 0:
        kind = (
            f"a binary file: byte {at + zero:,} is zero; leave it out, or take out what is no text"
        )
    if kind is not None:
        raise ValueError(f"{path} is not text but {kind}")


def _binary_kind(sample: bytes) -> str | None:
    # No text in UTF-8 or in an older 8-bit encoding has one.
    zeros = "a binary file: it has zero bytes" if b"\0" in sample else None
    return _kind_by_beginning(sample) or zeros


def _kind_by_beginning(sample: bytes) -> str | None:
    return next((kind for first, kind in _BEGINNINGS.items() if sample.startswith(first)), None)


def _checked(source: Source) -> Source:
    if source.nbytes:
        return source
    if source.files:
        raise ValueError("holds no text: it is empty")
    more = f" among its {_counted(len(source.other_files), 'file')}" if source.other_files else ""
    raise ValueError(f"holds no text: no {', '.join(TEXT_SUFFIXES)}{more}")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _named(paths: tuple[Path, ...]) -> str:
    names = [path.name for path in paths[:_NUM_NAMED]]
    return ", ".join([*names, *(["..."] if len(paths) > _NUM_NAMED else [])])
