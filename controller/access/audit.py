"""Who did what: a file of JSON lines, one for each call that changes something or is refused.

It is only ever appended to. Once it is large it is set aside as `audit.jsonl.1`, and what was
there before as `.2`; the oldest is deleted.

An entry has a place: its file, by the digest of the first line, and the byte at which it begins
there. Neither changes while entries come in, files are renamed and old ones are deleted; no two
files begin with a call of the same microsecond from the same port. The time of an entry alone would
not do: calls may be of the same moment, and clocks are set back. It is part of the place because
it says of one whose file is not there that it was deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from controller.ratelimit import RateLimitedLog
from outlast import private

logger = logging.getLogger(__name__)

FILE_NAME = "audit.jsonl"
MAX_FILE_BYTES = 16 << 20
# Beside the one that is written.
NUM_OLD_FILES = 7
# Of each caller, and of all whom nobody knows together: who is refused may call as often as he
# likes, and shall not push out what others did.
MAX_REFUSED_PER_MINUTE = 60
# Of any text in an entry.
MAX_TEXT = 200
_TEXTS = ("caller", "peer", "call", "about", "why")
# The start of a digest, the first byte of an entry, and its whole second.
_PLACE = re.compile(r"([0-9a-f]{16})-([0-9]{1,18})-([0-9]{1,18})")
# Some hundred entries are read at once.
_BLOCK_BYTES = 1 << 16


class NoSuchPlaceError(ValueError):
    """No entry of this log has, or had, this place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One call."""

    at_s: float
    """Since 1970."""
    caller: str
    """"" where nobody is asked, or it is not known."""
    role: str
    peer: str
    """From where, as `ipv4:10.0.0.7:40112`."""
    call: str
    """Such as `Jobs/CancelJob`."""
    about: str
    """The job or node that it names, if any."""
    outcome: str
    """gRPC's code, `OK` where it was done."""
    why: str = ""
    """What it was refused for."""


class Audit:
    """The log of one controller."""

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / FILE_NAME
        self._max_file_bytes = max_file_bytes
        self._monotonic = monotonic
        self._log = RateLimitedLog(logger)
        self._refused: dict[str, deque[float]] = {}
        self._num_left_out = Counter[str]()
        # It is read in other threads than it is written in.
        self._renaming = threading.Lock()

    def add(self, entry: Entry) -> None:
        """Write an entry down. A disk that is full does not end the call that is done already."""
        if entry.why:
            if not self._has_room(entry.caller):
                self._num_left_out[entry.caller] += 1
                return
            if left_out := self._num_left_out.pop(entry.caller, 0):
                before = f" ({left_out} refused before it were not written down)"
                entry = replace(entry, why=entry.why[: MAX_TEXT - len(before)] + before)
        # gRPC writes the brackets of an address as a URL does.
        entry = replace(entry, peer=unquote(entry.peer))
        short = replace(entry, **{name: getattr(entry, name)[:MAX_TEXT] for name in _TEXTS})
        line = json.dumps(asdict(short), ensure_ascii=True) + "\n"
        try:
            with private.open_to_append(self._path) as file:
                file.write(line.encode())
                size = file.tell()
            if size >= self._max_file_bytes:
                self._set_aside()
        except OSError as error:
            self._log.warning(("disk",), "audit log %s: %s: %s", self._path, error, line.strip())

    def read(self) -> Iterator[Entry]:
        """All entries that are kept, newest first."""
        return (entry for _, entry in self.older_than(""))

    def older_than(self, place: str) -> Iterator[tuple[str, Entry]]:
        """The entries before the one at a place, newest first, each with its own place; "": all.

        Files are read in blocks from their ends, and no further than entries are taken. Before an
        entry that was deleted there are none.

        Raises:
            NoSuchPlaceError: there is no such place, and was none.
        """
        with ExitStack() as opened:
            # Files that are set aside meanwhile would be read twice.
            with self._renaming:
                files = [
                    opened.enter_context(path.open("rb"))
                    for path in (self._path, *map(self._old, range(1, NUM_OLD_FILES + 1)))
                    if path.exists()
                ]
            end: int | None = None
            if place:
                at, end = _found(files, place)
                files = files[at:]
            for file in files:
                digest = _digest_of(file)
                for start, line in _lines_before(file, end):
                    # The last one of a controller that was killed may be cut short.
                    try:
                        entry = Entry(**json.loads(line))
                    except (ValueError, TypeError):
                        logger.debug("no entry of the audit log: %r", line)
                    else:
                        yield f"{digest}-{start}-{max(0, int(entry.at_s))}", entry
                end = None

    def _has_room(self, caller: str) -> bool:
        now_s = self._monotonic()
        # As many as there are names with tokens or certificates.
        recent = self._refused.setdefault(caller, deque())
        while recent and recent[0] <= now_s - 60.0:
            recent.popleft()
        if len(recent) >= MAX_REFUSED_PER_MINUTE:
            return False
        recent.append(now_s)
        return True

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{FILE_NAME}.{number}")

    def _set_aside(self) -> None:
        with self._renaming:
            for number in range(NUM_OLD_FILES, 1, -1):
                if self._old(number - 1).exists():
                    self._old(number - 1).replace(self._old(number))
            self._path.replace(self._old(1))


def _found(files: Sequence[BinaryIO], place: str) -> tuple[int, int]:
    """Which file a place is in, and the byte there; behind the last one when it was deleted."""
    allowed = "allowed: `next` of the page before"
    if (given := _PLACE.fullmatch(place)) is None:
        raise NoSuchPlaceError(f"is {place!r}; {allowed}")
    start = int(given[2])
    for at, file in enumerate(files):
        if _digest_of(file) == given[1]:
            if _is_start(file, start):
                return at, start
            break
    else:
        if files and int(given[3]) <= _begun_s(files[-1]):
            return len(files), 0
    raise NoSuchPlaceError(f"is {place!r}, which this controller's log does not have; {allowed}")


def _begun_s(file: BinaryIO) -> float:
    """The time of the first entry of a file."""
    file.seek(0)
    try:
        return float(json.loads(file.readline(_BLOCK_BYTES))["at_s"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def _digest_of(file: BinaryIO) -> str:
    file.seek(0)
    return hashlib.sha256(file.readline(_BLOCK_BYTES)).hexdigest()[:16]


def _is_start(file: BinaryIO, start: int) -> bool:
    """Whether a line begins at a byte of a file."""
    file.seek(max(0, start - 1))
    before = file.read(2)
    return bool(before) if start == 0 else len(before) == 2 and before[:1] == b"\n"


def _lines_before(file: BinaryIO, end: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that begin before a byte, last first, each with its own first byte."""
    start = file.seek(0, os.SEEK_END) if end is None else end
    # What was read of a line that begins before the block.
    rest = b""
    while start:
        size = min(_BLOCK_BYTES, start)
        start -= size
        file.seek(start)
        block = file.read(size) + rest
        rest, *lines = block.split(b"\n")
        at = start + len(block)
        for line in reversed(lines):
            at -= len(line)
            if line:
                yield at, line
            at -= 1
    if rest:
        yield 0, rest
