"""A unit's files while they are made, and the record of how far they are.

Most units are done in seconds, and begin anew where they were cut off. One of any size makes a
record now and then: where in its source it goes on, and how much of its files belongs to what is
before that. The next run drops what was written behind the record and goes on there. A record that
is damaged, of another order or of more than the files hold is none, and the unit begins anew.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from checkpoint.core.checked_json import Fields, RecordError, decode_checked, encode_checked
from outlast.tokens.writer import NOTHING, Mark, TokenWriter

SPLITS = ("train", "validation")
# In a unit's folder; written under another name first.
RECORD = "progress.json"
_DRAFT = "progress.json.new"
_LOCK = "lock"
# For which a killed process may wait for its disk, and between two looks at it.
_ENDS_WITHIN_S = 60.0
_LOOK_S = 0.05
# Between records: so much is made again after a crash.
_INTERVAL_S = 5.0
_INTERVAL_BYTES = 64 << 20
# A record waits for the disk; so many times as long passes until the next one: 0.5 % of the time.
_TIMES_COST = 200


@dataclass(slots=True)
class Pace:
    """When the next record is due. Times are of one clock, in seconds."""

    since_s: float
    num_bytes: int = 0
    """Of tokens, in the last record."""
    cost_s: float = 0.0
    """What that one took."""

    def is_due(self, now_s: float, num_bytes: int) -> bool:
        """Whether there is much that no record has, and the last one was cheap enough for it."""
        passed_s = now_s - self.since_s
        is_much = passed_s >= _INTERVAL_S or num_bytes - self.num_bytes >= _INTERVAL_BYTES
        return is_much and passed_s >= _TIMES_COST * self.cost_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    position: Fields
    marks: Mapping[str, Mark]


class Partial:
    """The files of a unit, by their split, in a folder that gets its name when they are whole."""

    def __init__(self, part: Path, token_type: str, identity: str) -> None:
        """`part` is the folder's name in the end; `identity` says what its tokens are made of.

        Raises:
            ValueError: a process of an earlier run does not end.
            OSError: the folder cannot be written.
        """
        self._part = part
        self._folder = part.with_name(f"{part.name}.partial")
        self._identity = identity
        self._folder.mkdir(exist_ok=True)
        # A killed run's process may wait for the disk still, and then write a last time.
        self._lock = _locked(self._folder / _LOCK)
        try:
            record = _read(self._folder, token_type, identity)
            if record is None:
                _clear(self._folder)
            self.position = record.position if record else None
            """What `keep` was given last, by an earlier run; None at the beginning."""
            marks = record.marks if record else {}
            self.writers = {
                split: TokenWriter(self._folder / split, token_type, marks.get(split, NOTHING))
                for split in SPLITS
            }
        except BaseException:
            self._lock.close()
            raise
        self._pace = Pace(time.monotonic(), self._num_bytes())

    def __enter__(self) -> Partial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for writer in self.writers.values():
            writer.abandon()
        self._lock.close()

    def keep(self, position: Mapping[str, int | str]) -> None:
        """Note that what is written ends at `position` of the source, if that is due."""
        began_s, num_bytes = time.monotonic(), self._num_bytes()
        if not self._pace.is_due(began_s, num_bytes):
            return
        fields = {
            "identity": self._identity,
            "position": position,
            "marks": {split: asdict(writer.mark()) for split, writer in self.writers.items()},
        }
        draft = self._folder / _DRAFT
        with draft.open("wb") as file:
            file.write(encode_checked(fields))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._folder / RECORD)
        _flush_folder(self._folder)
        ended_s = time.monotonic()
        self._pace = Pace(ended_s, num_bytes, ended_s - began_s)

    def finish(self) -> None:
        """Complete the files, and give the folder its name."""
        # All that can take long comes before the record is lost.
        for writer in self.writers.values():
            writer.finish()
        (self._folder / RECORD).unlink(missing_ok=True)
        for writer in self.writers.values():
            writer.close()
        (self._folder / _LOCK).unlink()
        self._folder.rename(self._part)

    def _num_bytes(self) -> int:
        return sum(writer.num_bytes for writer in self.writers.values())


def has_records(parts: Path) -> bool:
    """Whether a folder of parts has one that a run could go on within."""
    return any(parts.glob(f"*.partial/{RECORD}"))


def _locked(path: Path) -> TextIO:
    lock, deadline_s = path.open("w"), time.monotonic() + _ENDS_WITHIN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                lock.close()
                raise ValueError(
                    f"{path.parent} is still open in a process of an earlier run; end that one "
                    f"(fuser {path}), and try again"
                ) from error
            time.sleep(_LOOK_S)
        else:
            return lock


def _read(folder: Path, token_type: str, identity: str) -> _Record | None:
    try:
        fields = decode_checked((folder / RECORD).read_bytes())
        if fields.text("identity") != identity:
            return None
        found = fields.inner("marks")
        marks = {split: _mark(found.inner(split)) for split in SPLITS}
        position = fields.inner("position")
    except (OSError, RecordError):
        return None
    is_held = all(mark.is_held_by(folder / split, token_type) for split, mark in marks.items())
    return _Record(position=position, marks=marks) if is_held else None


def _mark(fields: Fields) -> Mark:
    return Mark(
        num_tokens=fields.integer("num_tokens"),
        num_sequences=fields.integer("num_sequences"),
        num_documents=fields.integer("num_documents"),
        num_open=fields.integer("num_open"),
    )


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != _LOCK:
            path.unlink()


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
