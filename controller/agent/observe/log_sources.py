"""The logs that a query is about: which files, and from where on.

What was written since a moment is found by the notes beside a log; what was deleted of it is
not there. Lines are searched here, a bounded piece at a time, whatever the length of the log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.agent.observe.log_files import read_log
from controller.agent.observe.log_times import LogTimes
from outlast.patterns import LinePattern
from outlast.worker_contract import ALL_LOGS, log_rank

# A longer line is searched in parts.
MAX_LINE_BYTES = 64 * 1024
# Searched at a time: some milliseconds.
SEARCH_BYTES = 1 << 20

_ATTEMPT = re.compile(r"a(\d+)")


@dataclass(slots=True)
class Source:
    """One log file and how far it was sent."""

    attempt: int
    rank: int
    path: Path
    offset: int
    # Of a search: the line that had begun by `offset`.
    begun: bytes = b""
    sent_bytes: int = 0


def newest_attempt(job_dir: Path) -> int:
    """The newest attempt that has written logs; 0 when none has."""
    for attempt in reversed(_attempts(job_dir)):
        if any((job_dir / f"a{attempt}").glob(ALL_LOGS)):
            return attempt
    return 0


def sources(job_dir: Path, ranks: range | None, *, after_attempt: int) -> list[Source]:
    """Log files of attempts after this one, from their beginnings, oldest attempt first."""
    found = []
    for attempt in _attempts(job_dir):
        if attempt <= after_attempt:
            continue
        for path in sorted((job_dir / f"a{attempt}").iterdir()):
            its_rank = log_rank(path.name)
            if its_rank is not None and (ranks is None or its_rank in ranks):
                found.append(Source(attempt, its_rank, path, 0))
    return found


def first_line(path: Path, at_least: int, since_s: float) -> int:
    """Where the first line that was written since then begins, not before `at_least`."""
    return _line_start(path, max(at_least, LogTimes(path).since(since_s) if since_s else 0))


def search(source: Source, pattern: LinePattern) -> tuple[bool, list[tuple[int, bytes]]]:
    """Read on in a log: whether there was more, and the lines that match, with their ends."""
    begin, data = read_log(source.path, source.offset, SEARCH_BYTES)
    if begin != source.offset:
        # Something in between was deleted, with the line that had begun.
        source.begun = b""
    if not data:
        return False, []
    *lines, begun = (source.begun + data).split(b"\n")
    end = begin - len(source.begun)
    source.offset = begin + len(data)
    found = []
    for line in lines:
        end += len(line) + 1
        if _has(line, pattern):
            found.append((end, line + b"\n"))
    source.begun = begun
    if len(begun) > MAX_LINE_BYTES:
        found += rest(source, pattern)
    return True, found


def rest(source: Source, pattern: LinePattern) -> list[tuple[int, bytes]]:
    """The line that had begun, as far as it goes, if it matches."""
    begun, source.begun = source.begun, b""
    return [(source.offset, begun)] if begun and _has(begun, pattern) else []


def timed(source: Source, found: list[tuple[int, bytes]]) -> Iterator[tuple[bytes, float]]:
    """Lines that were found put together where they were written at the same time."""
    times = LogTimes(source.path).written_s([end for end, _ in found])
    piece, piece_s = b"", 0.0
    for (_, line), line_s in zip(found, times, strict=True):
        if piece and (line_s != piece_s or len(piece) + len(line) > MAX_LINE_BYTES):
            yield piece, piece_s
            piece = b""
        piece, piece_s = piece + line, line_s
    if piece:
        yield piece, piece_s


def _attempts(job_dir: Path) -> list[int]:
    if not job_dir.is_dir():
        return []
    matches = (_ATTEMPT.fullmatch(path.name) for path in job_dir.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def _has(line: bytes, pattern: LinePattern) -> bool:
    """Whether a line matches, in parts where it is too long for one."""
    return any(
        pattern.matches(line[at : at + MAX_LINE_BYTES].decode(errors="replace"))
        for at in range(0, max(1, len(line)), MAX_LINE_BYTES)
    )


def _line_start(path: Path, offset: int) -> int:
    """Where the line that `offset` is in begins."""
    begin = max(0, offset - MAX_LINE_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            before = os.pread(file.fileno(), offset - begin, begin)
    except OSError:
        return offset
    # What was deleted reads as zeros.
    newline = max(before.rfind(b"\n"), before.rfind(b"\0"))
    return begin + newline + 1
