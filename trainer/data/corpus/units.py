"""What of a corpus is one piece of work: a file, or a part of a large file of JSON lines."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from outlast.sources import SKIPPED_FOLDERS, TEXT_SUFFIXES, survey

LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
# Small enough that the last units of a corpus keep all processes busy, large enough that starting
# one costs nothing.
_UNIT_BYTES = 64 << 20
# A line is in memory as a whole; none of a corpus of text is this long.
_MAX_LINE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Bytes `first` to `end` of a file; a line belongs to the unit that it begins in."""

    path: str
    first: int
    end: int
    size: int
    """Of the whole file, and when it was written: another file is another corpus."""
    written_ns: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.first


def find_units(sources: Sequence[Path]) -> list[Unit]:
    """The work that sources make, in their order and in that of the paths in a folder.

    Raises:
        ValueError: a source is not there, holds nothing that is read, or is no text.
    """
    units: list[Unit] = []
    for source in sources:
        files = [source] if source.is_file() else _files_in(source)
        if not files:
            raise ValueError(
                f"{source} holds no {', '.join((*TEXT_SUFFIXES, *LINES_SUFFIXES))} files"
            )
        for path in files:
            if not path.name.endswith(LINES_SUFFIXES):
                try:
                    survey(str(path), None)
                except ValueError as error:
                    raise ValueError(f"{path} {error}") from error
            units += _of_file(path)
    return units


def _files_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is neither a file nor a folder")
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS]
        found += [
            path
            for each in names
            if each.endswith((*TEXT_SUFFIXES, *LINES_SUFFIXES))
            and (path := Path(place) / each).stat().st_size
        ]
    return sorted(found)


def _of_file(path: Path) -> list[Unit]:
    stat = path.stat()
    # Only lines say where a part may begin, and only where they are not compressed.
    step = _UNIT_BYTES if path.name.endswith(".jsonl") else max(1, stat.st_size)
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


def documents(unit: Unit, text_field: str) -> Iterator[str]:
    """The documents that begin in a unit; those without text are left out.

    Raises:
        ValueError: a line is no JSON object with text in the field.
    """
    path = Path(unit.path)
    if not path.name.endswith(LINES_SUFFIXES):
        text = path.read_bytes().decode("utf-8", errors="replace")
        if text:
            yield text
        return
    for at, line in _lines(path, unit):
        if not line.strip():
            continue
        try:
            found = json.loads(line)[text_field]
        except (ValueError, KeyError, TypeError) as error:
            what = f"has no {text_field!r}" if isinstance(error, KeyError) else "is no JSON object"
            raise ValueError(f"{path}: the line at byte {at:,} {what}; see --text-field") from error
        if not isinstance(found, str):
            raise ValueError(f"{path}: {text_field!r} of the line at byte {at:,} is no text")
        if found:
            yield found


def _lines(path: Path, unit: Unit) -> Iterator[tuple[int, bytes]]:
    is_packed = path.name.endswith(".gz")
    with cast(BinaryIO, gzip.open(path) if is_packed else path.open("rb")) as file:
        at = unit.first
        if at:
            # The line that the unit before ends in is that unit's.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while is_packed or at < unit.end:
            line = file.readline(_MAX_LINE_BYTES)
            if not line:
                return
            yield at, line
            at += len(line)
