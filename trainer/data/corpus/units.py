"""What of a corpus is one piece of work: a file, or a part of a large one that has records."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from outlast.sources import SKIPPED_FOLDERS, TEXT_SUFFIXES, survey
from trainer.data.corpus import parquet
from trainer.data.corpus.zstd import ZstdFile, zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer

LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_SUFFIXES = (*TEXT_SUFFIXES, *LINES_SUFFIXES, parquet.SUFFIX)
# Of a file of lines: so many that the last ones keep all processes busy, none so small that
# starting one costs anything, and few enough of a large corpus.
_NUM_UNITS = 64
_LEAST_UNIT_BYTES = 1 << 20
_UNIT_BYTES = 16 << 20
# A row group is never in two, and as large as this or larger.
_PARQUET_UNIT_BYTES = 64 << 20
# A line is in memory as a whole; none of a corpus of text is this long.
_MAX_LINE_BYTES = 1 << 30
_BUFFER_BYTES = 1 << 20
# What packed files begin with, by the ending of their names.
_PACKED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
# Names that a message has; more would not help a person.
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Bytes `first` to `end` of a file; a line, or a row group, belongs to the unit that it
    begins in."""

    path: str
    first: int
    end: int
    size: int
    """Of the whole file, and when it was written: another file is another corpus."""
    written_ns: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What sources hold."""

    units: tuple[Unit, ...]
    skipped: tuple[Path, ...]
    """Files and folders inside them that are not read, because of their names."""


def find_units(sources: Sequence[Path]) -> Corpus:
    """The work that sources make, in their order and in that of the paths in a folder.

    Raises:
        ValueError: a source is not there, holds nothing that is read, or is no text.
    """
    units: list[Unit] = []
    skipped: list[Path] = []
    for source in sources:
        try:
            found = [source] if source.is_file() else _files_in(source, skipped)
            files = [path for path in found if path.stat().st_size]
            for path in files:
                _check_content(path)
                units += _of_file(path)
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error
        if not files:
            raise ValueError(f"{source} {_without_text(found, skipped)}")
    return Corpus(units=tuple(units), skipped=tuple(sorted(skipped)))


def _files_in(folder: Path, skipped: list[Path]) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is neither a file nor a folder")
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        skipped += [Path(place) / each for each in folders if each in SKIPPED_FOLDERS]
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS]
        for each in names:
            is_read = each.endswith(_SUFFIXES)
            (found if is_read else skipped).append(Path(place) / each)
    return sorted(found)


def _without_text(found: Sequence[Path], skipped: Sequence[Path]) -> str:
    if found:
        return "is empty"
    return (
        f"holds no {', '.join(_SUFFIXES)} files{f', but {summary_of(skipped)}' if skipped else ''}"
    )


def summary_of(paths: Sequence[Path]) -> str:
    """How many, and the names of the first."""
    names = [path.name for path in paths[:_NUM_NAMED]]
    return f"{len(paths):,}: {', '.join([*names, *(['...'] if len(paths) > _NUM_NAMED else [])])}"


def _check_content(path: Path) -> None:
    """Refuse at once what is no text, and not when its turn comes.

    Raises:
        ValueError: it is something else.
    """
    if path.suffix == parquet.SUFFIX:
        parquet.check(path)
        return
    beginning = _PACKED.get(path.suffix)
    if beginning is not None:
        with path.open("rb") as file:
            if file.read(len(beginning)) != beginning:
                raise ValueError(
                    f"{path} is no {path.suffix} archive; name it .jsonl if it is not packed"
                )
        if path.suffix == ".zst":
            zstandard(path)
        return
    try:
        survey(str(path), None)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def _of_file(path: Path) -> list[Unit]:
    stat = path.stat()
    # Lines say where a part may begin where they are not compressed, and row groups.
    if path.suffix == parquet.SUFFIX:
        step = _PARQUET_UNIT_BYTES
    else:
        share = max(_LEAST_UNIT_BYTES, stat.st_size // _NUM_UNITS)
        step = min(_UNIT_BYTES, share) if path.suffix == ".jsonl" else max(1, stat.st_size)
    return [
        Unit(
            path=str(path),
            first=first,
            end=min(first + step, stat.st_size),
            size=stat.st_size,
            written_ns=stat.st_mtime_ns,
        )
        for first in range(0, stat.st_size, step)
    ]


def is_text_file(unit: Unit, fields: Mapping[str, str]) -> bool:
    """Whether a unit is a text file, and so one document.

    Raises:
        ValueError: it is, and has no prompts.
    """
    if unit.path.endswith((*LINES_SUFFIXES, parquet.SUFFIX)):
        return False
    if len(fields) > 1:
        raise ValueError(f"{unit.path} is text and has no {' nor '.join(fields)}; give JSON lines")
    return True


def is_small(unit: Unit) -> bool:
    """Whether a unit is of a bounded size: a part of plain lines; others are whole files or row
    groups, however large these are."""
    return Path(unit.path).suffix == ".jsonl"


def is_packed(unit: Unit) -> bool:
    """Whether a unit is a compressed file."""
    return Path(unit.path).suffix in _PACKED


def documents(
    unit: Unit, fields: Mapping[str, str], read: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[tuple[str, ...]]:
    """The texts of each document that begins in a unit; those whose last is empty are left out.

    Not of a text file, which is one document of any size: `long_text.pieces` reads it.

    `fields` has the names in a JSON line, or of columns, by the option that gives them: of the
    text, or of a prompt and its completion. Of a packed file, `read` gets numbers of bytes as they
    are read, `num_bytes` of the unit in all.

    Raises:
        ValueError: a line is no JSON object with text in the fields, or a row has none.
    """
    path = Path(unit.path)
    if path.suffix == parquet.SUFFIX:
        found = parquet.texts(path, unit.first, unit.end, fields)
        yield from (texts for texts in found if texts[-1])
        return
    try:
        for at, line in _lines(path, unit, read):
            if not line.strip():
                continue
            texts = _texts_of(f"{path}: the line at byte {at:,}", line, fields)
            if texts[-1]:
                yield texts
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}; copy it again") from error


def _texts_of(where: str, line: bytes, fields: Mapping[str, str]) -> tuple[str, ...]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}; give one object a line") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no JSON object, but {type(found).__name__}")
    texts = []
    for option, field in fields.items():
        if field not in found:
            others = ", ".join(map(repr, found)) or "nothing"
            raise ValueError(f"{where} has no {field!r}, but {others}; give another {option}")
        text = found[field]
        if not isinstance(text, str):
            raise ValueError(f"{where} has no text in {field!r}, but {type(text).__name__}")
        # JSON may have half of a surrogate pair, which is no character and has no UTF-8.
        texts.append(text.encode(errors="replace").decode() if b"\\u" in line else text)
    return tuple(texts)


def _lines(path: Path, unit: Unit, read: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    goes_on = is_packed(unit)
    with _opened(path, read) as file:
        at = unit.first
        if at:
            # The line that the unit before ends in is that unit's.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while goes_on or at < unit.end:
            line = file.readline(_MAX_LINE_BYTES)
            if not line:
                return
            yield at, line
            at += len(line)


@contextmanager
def _opened(path: Path, read: Callable[[int], None]) -> Iterator[BinaryIO]:
    if path.suffix not in _PACKED:
        with path.open("rb") as plain:
            yield plain
        return
    with io.BufferedReader(_Counted(path, read), _BUFFER_BYTES) as packed:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=packed) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            with io.BufferedReader(ZstdFile(path, packed), _BUFFER_BYTES) as unpacked:
                yield unpacked


class _Counted(io.FileIO):
    """A file whose bytes are counted as they are read."""

    def __init__(self, path: Path, read: Callable[[int], None]) -> None:
        super().__init__(path)
        self._read = read

    def readinto(self, buffer: Buffer) -> int | None:
        count = super().readinto(buffer)
        self._read(count or 0)
        return count
