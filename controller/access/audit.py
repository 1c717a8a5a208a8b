"""Who did what: a file of JSON lines, one for each call that changes something or is refused.

It is only ever appended to. Once it is large it is set aside as `audit.jsonl.1`, and what was
there before as `.2`; the oldest is deleted.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
        for path in (self._path, *map(self._old, range(1, NUM_OLD_FILES + 1))):
            if not path.exists():
                continue
            for line in reversed(path.read_bytes().splitlines()):
                # The last one of a controller that was killed may be cut short.
                try:
                    yield Entry(**json.loads(line))
                except (ValueError, TypeError):
                    logger.debug("no entry of the audit log: %r", line)

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
        for number in range(NUM_OLD_FILES, 1, -1):
            if self._old(number - 1).exists():
                self._old(number - 1).replace(self._old(number))
        self._path.replace(self._old(1))
