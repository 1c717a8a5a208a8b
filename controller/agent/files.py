"""Files that others write, and that may be gone or too large."""

from __future__ import annotations

import os
from pathlib import Path

# Of a log: the last line of a traceback says what went wrong.
_CAUSE_BYTES = 4096
_CAUSE_CHARS = 300


def tail(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a file; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return file.read(num_bytes)
    except OSError:
        return b""


def last_words(log: Path, begin: int) -> str:
    """The last line of a log from a byte on, to go on with after how its process ended."""
    try:
        num_bytes = log.stat().st_size - begin
    except OSError:
        return ""
    text = tail(log, max(0, min(num_bytes, _CAUSE_BYTES))).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f": {lines[-1][:_CAUSE_CHARS]}" if lines else ", and its log says nothing"
